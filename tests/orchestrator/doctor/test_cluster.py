"""What needs no Ray that runs: addresses, uploads, and the arithmetic of bandwidth."""

from pathlib import Path

from orchestrator.doctor import cluster
from orchestrator.doctor.bandwidth import judge


def test_the_address_of_a_dashboard_takes_jobs_alone() -> None:
    found = cluster.check_address({"RAY_ADDRESS": "http://127.0.0.1:8265"})
    assert found.status == "fail"
    assert "ray job submit" in found.way_out


def test_an_upload_that_a_head_would_refuse(tmp_path: Path) -> None:
    """100 MiB and one more byte; what .gitignore names, and .venv, is left out."""
    (tmp_path / "weights").mkdir()
    for path, size in {"weights/a.bin": 100 * 2**20, "x.py": 1, ".venv": 2**30, "runs": 2**30}.items():
        with (tmp_path / path).open("wb") as file:
            file.truncate(size)
    (tmp_path / ".gitignore").write_text("runs\n")
    found = cluster.check_upload(tmp_path)
    assert found.status == "warn"
    assert "weights 100 MiB" in found.found
    (tmp_path / ".rayignore").write_text("weights\n")
    assert cluster.check_upload(tmp_path).status == "ok"


def test_bandwidth_by_hand() -> None:
    """4 MiB on each of 2 workers: all-reduce moves 2 * 1/2 of it, all-to-all 1/2; in 1 ms and 0.5 ms both are
    4.19 GB/s. A second is far too slow.
    """
    fast = judge("gloo", 2, {"all_reduce": 1e-3, "all_to_all": 0.5e-3})
    assert fast.found == "2 workers over gloo: all-reduce 4.19 GB/s, all-to-all 4.19 GB/s"
    assert judge("gloo", 2, {"all_reduce": 1.0, "all_to_all": 0.5e-3}).status == "warn"

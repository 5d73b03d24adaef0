"""Data and weights that lie elsewhere are the same if their digests are."""

import shutil
from pathlib import Path

import pytest

from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.data.manifest import open_manifest
from orchestrator.errors import UsageError
from orchestrator.runs.contents import contents_of, digest_at, moved
from orchestrator.runs.run_directory import RunDir, acquire_run_dir


def changed(folder: Path) -> Path:
    """Makes the data set another one."""
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"rows": ', '"rows": 1', 1))
    return folder


def test_fields_that_only_moved(digits: str, tmp_path: Path) -> None:
    here, other = shutil.copytree(digits, tmp_path / "here"), changed(shutil.copytree(digits, tmp_path / "b"))
    weights = tmp_path / "w.safetensors"
    weights.write_bytes(b"weights")
    was = {"data": "/gone", "few": ["/gone", digits], "arm": {"init": "/gone.safetensors", "lr": 1}}
    contents = {"data": open_manifest(digits).digest(), "few:0": open_manifest(digits).digest()}
    contents["arm.init"] = str(digest_at(str(weights)))
    now = {"data": str(here), "few": [str(here), str(here)], "arm": {"init": str(weights), "lr": 1}}
    assert contents_of(now) == contents | {"few:1": contents["data"]}
    assert moved({name: (was[name], now[name]) for name in was}, contents) == {*was}
    for name, value in {
        "data": str(other),
        "few": [str(here)],
        "arm": {"init": str(weights), "lr": 2},
    }.items():
        assert moved({name: (was[name], value)}, contents) == set()
    assert moved({"data": ("/gone", "/gone too")}, {}) == set()  # nothing is known of either
    assert moved({"data": (digits, str(here))}, {}) == {"data"}  # both are there


def test_a_run_goes_on_with_data_elsewhere_and_knows_the_place(digits: str, tmp_path: Path) -> None:
    few, old, new = tmp_path / "few", tmp_path / "old", tmp_path / "new"
    for folder in (few, old):
        shutil.copytree(digits, folder)
    changes = {"storage": str(tmp_path / "s"), "data.path": str(old), "train.fewshot": {"paths": [str(few)]}}
    run, digest = override(RunConfig(), changes), open_manifest(digits).digest()
    key = acquire_run_dir(run, digest).key
    old.rename(new)
    few.rename(tmp_path / "fewer")
    now = override(run, {"data.path": str(new), "train.fewshot.paths": [str(tmp_path / "fewer")]})
    record = acquire_run_dir(now, digest, "resume")
    assert record.key == key
    assert record == RunDir.of(now).record()
    assert record.config["data"]["path"] == str(new)
    (Path(RunDir.of(run).path) / "metrics.jsonl").write_text("{}")
    shutil.rmtree(tmp_path / "fewer")
    few = changed(shutil.copytree(digits, tmp_path / "other"))
    other = override(now, {"train.fewshot.paths": [str(few)]})
    with pytest.raises(UsageError, match=r"train.fewshot.paths: .*fewer.* -> .*other"):
        acquire_run_dir(other, digest)

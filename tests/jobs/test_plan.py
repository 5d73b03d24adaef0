"""`jobs/plan.py` as a user runs it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs import plan
from tests.jobs.bare import run_bare

Call = Callable[..., tuple[str, str]]


def planned(call: Call, *args: str) -> tuple[str, list[str]]:
    """What the command exits with, empty for success, and the lines after the first."""
    error, out = call(plan.main, *args)
    return error, out.splitlines()[1:]


@pytest.mark.smoke
def test_a_model_of_3_7_billion() -> None:
    job = run_bare("jobs/plan.py", "soft-B/16-128e", "--devices", "16", "--set", "data.batch_size=256")
    assert (job.returncode, job.stderr) == (0, "")
    first, *lines = job.stdout.splitlines()
    assert first == "planning soft-B/16-128e on 16 devices: loading libraries .."
    assert max(map(len, lines)) <= 110
    assert lines[0].startswith("3685.7M parameters, 3626.8M of them in experts; a checkpoint is 44.23 GB, ")
    assert lines[1] == "a step of a rank: 1 x 16 images, bfloat16, adamw, 16 devices, 8 to a node"
    memory, traffic = (
        next(i for i, line in enumerate(lines) if line.startswith(unit)) for unit in ("GiB ", "GB ")
    )
    rows = [line.split() for line in lines[memory + 1 : memory + 6]]
    assert [row[:2] for row in rows] == [["16", "1"], ["8", "2"], ["4", "4"], ["2", "8"], ["1", "16"]]
    for row in rows:
        assert row[2:4] == ["0.86", "1.72"]  # 3.69e9 x 4 / 16 bytes, and twice that of moments
        assert float(row[7]) == pytest.approx(sum(map(float, row[2:7])), abs=0.03)
        assert row[8:] == ["fits"]
    assert lines[traffic + 5].split()[:5] == ["1", "16", "0.03", "|", "0.04"]  # 7/16 and 8/16 of 0.076 GB
    assert lines[-1] == "chosen: dp=1, ep=16, least time on links among the layouts that fit"


def test_nothing_fits(call: Call) -> None:
    error, lines = planned(call, "soft-B/16-128e", "--memory", "6", "--set", "data.batch_size=256")
    assert sum(line.endswith("does not fit") for line in lines) == 4
    assert error.startswith("error: no layout fits 6 GiB; dp=1, ep=8 needs ")
    assert "are activations: use more workers, a smaller train.microbatch" in error
    assert not any(line.startswith("chosen") for line in lines)
    error, lines = planned(
        call, "soft-B/16-128e", "--memory", "6", "--set", "data.batch_size=256", "--devices", "32"
    )
    assert not error
    assert lines[-1].startswith("chosen: dp=1, ep=32")


def test_where_auto_does_not_fit(call: Call) -> None:
    """Few experts and many rows: traffic wants a smaller ep than memory."""
    model = ("vmoe-S/32", "--devices", "32", "--set", "data.batch_size=131072")
    _, lines = planned(call, *model, "--memory", "1000")
    peaks = {row[1]: float(row[7]) for row in (line.split() for line in lines if line.endswith("  fits"))}
    ep = lines[-1].split("ep=")[1].split(",")[0]
    tight = str((peaks[ep] + min(peaks.values())) / 2)
    _, lines = planned(call, *model, "--memory", tight)
    assert lines[-1].startswith(
        f"scale.ep=auto ignores memory and --intra, --inter: it takes {ep}; set scale"
    )
    assert lines[-2].startswith("chosen: dp=")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["S/17"], "unknown model 'S/17'; known: debug, S/32, "),
        (["--set", "scale.ep=4"], "--set scale.ep: every ep is planned"),
        (["--devices", "0"], "workers must be at least 1, got 0"),
        (["--devices", "6"], "data.batch_size=64 does not divide over workers=6"),
        (["--inter", "0"], "the rates of links must be positive"),
    ],
)
def test_mistakes(call: Call, args: list[str], message: str) -> None:
    error, lines = planned(call, *args)
    assert error.startswith("error: ")
    assert message in error
    assert "\n" not in error
    assert not lines


@pytest.mark.slow
def test_dry_run_of_54_billion(call: Call) -> None:
    """0.98e9 bytes of parameters on each of 256 workers: 53.7e9 / 256 of experts, and a part of the rest."""
    layout = ("--workers", "256", "--ep", "32", "--set", "data.batch_size=4096")
    error, lines = planned(call, "soft-H/14-256e", "--dry-run", *layout)
    assert not error
    assert lines[2] == "dp=8, ep=32"
    rows = [line.split() for line in lines]
    assert ["parameters", "0.79"] in rows
    assert ["optimizer", "1.58"] in rows
    assert [row[1] for row in rows if row[:1] == ["peak,"]] == ["forward", "backward", "optimizer"]
    assert ["all_to_all", "32", "1", "64", "0.650"] in rows  # of 16 blocks


def test_dry_run_says_what_does_not_fit(call: Call) -> None:
    small = ("--dry-run", "--workers", "4", "--set", "train.compute_dtype=float32")
    error, lines = planned(call, "debug", *small)
    assert not error
    assert lines[-1].startswith("the dry run took ")
    error, lines = planned(call, "debug", *small, "--memory", "0.0001")
    assert error.startswith("error: debug needs 0.00")
    assert "GiB per device, and 90% of its 0.0001 GiB are 9e-05: use more workers" in error


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["soft-S/16-128e", "--workers", "6"], "data.batch_size=64 does not divide over workers=6"),
        (["soft-S/16-128e", "--workers", "8", "--ep", "3"], "ep=3 does not divide workers=8"),
        (
            ["soft-S/16-128e", "--workers", "32", "--set", "model.moe.num_experts=48", "--ep", "32"],
            "num_experts=48 does not divide over ep=32; use one of [1, 2, 3, 4, 6, 8, 12, 16, 24, 48]",
        ),
        (
            ["soft-S/16-128e", "--workers", "56", "--ep", "8", "--set", "data.batch_size=56"],
            "rows in each expert, which dp=7 does not divide to shard them; use one of [1, 2, 3, 4, 6, 8, 12",
        ),
    ],
)
def test_layouts_that_are_refused(call: Call, args: list[str], message: str) -> None:
    error, lines = planned(call, "--dry-run", *args)
    assert error.startswith("error: ")
    assert message in error
    assert "\n" not in error
    assert not lines


@pytest.mark.usefixtures("empty_home", "cluster")
@pytest.mark.smoke
def test_checks_of_a_healthy_laptop(call: Call) -> None:
    code, out = call(plan.main, "--check")
    assert code == ""
    assert out.splitlines()[-1] == "0 of 10 checks failed"
    assert "ok    tracking" in out


@pytest.mark.usefixtures("cluster")
@pytest.mark.smoke
def test_a_failed_check_as_json(call: Call, empty_home: Path) -> None:
    code, out = call(plan.main, "--check", "--json", "--workers", "4")
    document = json.loads(out)  # nothing else is printed to stdout
    assert (code, document["failed"]) == ("1", 1)
    wrong = [one for one in document["findings"] if not one["ok"]]
    assert [one["check"] for one in wrong] == ["trials"]
    assert "the cluster has at most 2" in wrong[0]["message"]

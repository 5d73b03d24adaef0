"""A storage that moves from a disk to a bucket and back: it goes on, is evaluated and reported."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from jobs import evaluate, report
from orchestrator import storage, stores
from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.runs.metrics_file import read_metrics
from orchestrator.runs.run_directory import RunDir
from orchestrator.runs.sweep_directory import SweepDir
from orchestrator.sweeps.driver import acquire_sweep_dir
from orchestrator.sweeps.publish import publish
from orchestrator.sweeps.sweep import Sweep
from orchestrator.training.fit import fit
from tests.orchestrator.clouds import amazon, environment
from tests.trained_sweep import ARMS, SHORT

Call = Callable[..., tuple[str, str]]


def move(place: str, target: str) -> None:
    for name in storage.files(place):
        storage.write_bytes(f"{target}/{name}", storage.read_bytes(f"{place}/{name}"))
    storage.delete(place)


def go_on(sweep: Sweep, trained: list[int], until: dict[str, int]) -> None:
    """Trains these arms so far, and publishes, as the driver does."""
    record = acquire_sweep_dir(sweep, resume=False, labels={})
    for arm, step in until.items():
        fit(sweep.runs()[arm], lambda step, metrics: trained.append(step), until=step)
    done = all(RunDir.of(run).result() for run in sweep.runs().values())
    SweepDir.of(sweep.base).write(replace(record, status="finished" if done else "interrupted"))
    publish(SweepDir.of(sweep.base).path)


def at(sweep: Sweep, root: str) -> Sweep:
    return sweep.based_on(override(sweep.base, {"storage": root, "data.path": f"{root}/data/shards"}))


def evaluated(call: Call, model: str, *flags: str) -> list[tuple[str, float, float]]:
    """Returns data, accuracy and loss of each model."""
    stopped, said = call(evaluate.main, model, "--repeats", "1", "--out", "figures.json", *flags)
    assert stopped == "", said
    found = json.loads(Path("figures.json").read_text())
    return [(each["data"], each["metrics"]["acc1"], each["metrics"]["loss"]) for each in found]


@pytest.mark.usefixtures("no_pictures")
def test_a_storage_moves_to_a_bucket_and_back(
    few_digits: str, call: Call, tmp_path: Path, empty_store: Callable[[Path], str], monkeypatch
) -> None:
    """Nothing is refused, no step is trained twice, and figures are the same everywhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", empty_store(tmp_path / "mlflow"))
    sweep, trained = Sweep(base=override(RunConfig(), {**SHORT, "name": "tiny"}), arms=ARMS), list[int]()
    first, bucket, last = f"{tmp_path}/first", "s3://bucket/runs", f"{tmp_path}/last"
    shutil.copytree(few_digits, f"{first}/data/shards")
    go_on(at(sweep, first), trained, {"dense": 20, "token": 10})
    ((_, *before),) = evaluated(call, "tiny/trials/dense", "--storage", first)
    with amazon() as (proxy, make_bucket):
        for name, value in environment("s3", proxy.url).items():
            monkeypatch.setenv(name, value)
        stores.forget()
        make_bucket("bucket")
        move(first, bucket)
        go_on(at(sweep, bucket), trained, {"token": 20, "soft": 10})
        assert evaluated(call, "tiny/trials/dense", "--storage", bucket) == [
            (f"{bucket}/data/shards", *before)
        ]
        assert call(report.main, "--name", "tiny", "--storage", bucket)[0] == ""
        move(bucket, last)
        go_on(at(sweep, last), trained, {"soft": 20})
        assert evaluated(call, "sweep:tiny", "--storage", last)[0] == (f"{last}/data/shards", *before)
        stopped, said = call(report.main, "--name", "tiny", "--storage", last)
        assert (stopped, "has all of" in said) == ("", True), said
    stores.forget()
    assert trained == [10, 20] * 3
    for run in at(sweep, last).runs().values():
        assert [row.step for row in read_metrics(RunDir.of(run).path)] == [10, 20]


@pytest.mark.usefixtures("no_pictures")
def test_data_that_moved_alone_are_found_by_trials_that_had_ended(
    few_digits: str, call: Call, tmp_path: Path, empty_store: Callable[[Path], str], monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", empty_store(tmp_path / "mlflow"))
    old, new = shutil.copytree(few_digits, tmp_path / "old"), tmp_path / "new"
    base = override(
        RunConfig(), {**SHORT, "name": "tiny", "storage": f"{tmp_path}/runs", "data.path": str(old)}
    )
    sweep = Sweep(base=base, arms={arm: ARMS[arm] for arm in ("dense", "token")})
    go_on(sweep, [], {"dense": 20})
    old.rename(new)
    go_on(sweep.based_on(override(base, {"data.path": str(new)})), [], {"token": 20})
    found = evaluated(call, "sweep:tiny", "--storage", f"{tmp_path}/runs")
    assert [data for data, *_ in found] == [str(new)] * 2

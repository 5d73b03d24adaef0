"""Several trackers at once: each has every number, whatever the others do."""

from collections import defaultdict
from pathlib import Path

from orchestrator.plugins import load_plugins
from orchestrator.runs.measurements import write_measurement
from orchestrator.runs.metrics_file import MetricsWriter
from orchestrator.sweeps.sweep import Sweep
from orchestrator.tracking.base import Follower, TrackerConfig, following
from orchestrator.tracking.sync import Sync
from orchestrator.tracking.tensorboard import EventFiles
from tests.made_directories import begin, begin_sweep, change_record, end, report, run_at
from tests.mlflow_reader import newest_of
from tests.orchestrator.tracking.conftest import open_store
from tests.orchestrator.tracking.stores import Sqlite
from tests.orchestrator.tracking.test_tensorboard import written

PLUGIN = """
from dataclasses import dataclass
from typing import Literal

from orchestrator import Follower, Projection, TrackerConfig

@dataclass(frozen=True, kw_only=True)
class LinesConfig(TrackerConfig):
    kind: Literal["lines"] = "lines"

    def follow(self, directory: str) -> Follower:
        return Lines(directory)

class Lines(Follower):
    where = "lines.txt"

    def send(self, shown: Projection) -> None:
        self.part(shown, "lines", self.write, shown)

    def write(self, shown: Projection) -> None:
        lines = "".join(f"{s.name} {s.at} {s.value!r}\\n" for s in shown.scalars())
        self.write_file(shown, "lines.txt", lines.encode())
"""
Numbers = dict[str, list[tuple[int, float]]]


def lines(directory: str) -> Numbers:
    found = defaultdict(list)
    for line in Path(directory, "lines.txt").read_text().splitlines():
        name, at, value = line.split()
        found[name].append((int(at), float(value)))
    return dict(found)


def test_two_beside_mlflow(sqlite: Sqlite, tmp_path: Path) -> None:
    """After a resume that repeats steps, a second process, and a measurement. Values have 32 bits, as those
    of TensorBoard.
    """
    tracking = open_store(sqlite)
    (tmp_path / "lines_tracker.py").write_text(PLUGIN)
    load_plugins([tmp_path / "lines_tracker.py"])
    sweep = Sweep(base=run_at(tmp_path, "several"), arms={"a": {}, "b": {"train.lr": 0.5}})
    directory = begin_sweep(sweep)
    run_a, run_b = sweep.runs()["a"], sweep.runs()["b"]

    def followers() -> list[Follower]:
        kinds = [TrackerConfig.kinds[kind]() for kind in ("tensorboard", "lines")]
        return [Sync(tracking, directory), *(kind.follow(directory) for kind in kinds)]  # pyright: ignore

    said = list[str]()
    with following(followers(), said.append):
        report(run_a, {step: {"train/loss": step / 4} for step in range(1, 6)})
        begin(run_a)
        begin(run_b)
    with following(followers(), said.append):
        writer = MetricsWriter(run_a)
        writer.resumed(3)
        for step in range(4, 9):
            writer.report(step, {"train/loss": step / 4, "val/acc1": step / 16})
        writer.close()
        end(run_a, 9, train__loss=0.25, val__acc1=0.75)
        end(run_b, 2, val__acc1=0.5)
        write_measurement(f"{directory}/trials/a", {"eval/x/acc1": 0.625})
        change_record(directory, status="finished")
    assert said == []
    for name in "ab":
        trial = f"{directory}/trials/{name}"
        info = newest_of(tracking, trial)
        assert info
        shown = {metric: info.history(metric) for metric in info.metrics}
        assert shown == written(trial) == lines(trial)
    assert lines(f"{directory}/trials/a")["train/loss"] == [
        *((8 * step, step / 4) for step in range(1, 9)),
        (72, 0.25),
    ]


def test_one_that_fails_delays_no_other(sqlite: Sqlite, tmp_path: Path, monkeypatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no room")

    tracking, run = open_store(sqlite), run_at(tmp_path, "broken")
    directory, said = begin(run), list[str]()
    monkeypatch.setattr(EventFiles, "send", broken)
    with following([EventFiles(directory), Sync(tracking, directory)], said.append):
        end(run, 3, val__acc1=0.5)
    (line,) = said
    assert line.startswith("TensorBoard did not take all results: no room. They are in ")
    info = newest_of(tracking, directory)
    assert info
    assert (info.status, info.history("val/acc1")) == ("FINISHED", [(24, 0.5)])

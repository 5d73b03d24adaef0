"""Random schedules of faults, of which a sweep must not show anything at its end; and defects that they find.

Hypothesis draws a schedule and makes one that fails smaller. Each is repeated by its `Schedule(..)`, which a
failure prints; `SEED` repeats all of them.
"""

import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings, strategies as st

from orchestrator.packing import pack as packing
from orchestrator.runs import lock
from orchestrator.runs.metrics_file import LineWriter
from orchestrator.sweeps.budget import BudgetTracker
from orchestrator.tracking import base, sync
from orchestrator.tracking.find import KEY
from orchestrator.tracking.projection import ScalarReader
from orchestrator.tracking.store import open_tracking
from orchestrator.training import worker
from tests.parts import png
from tests.simulated.machine import WAYS, Fault, Machine
from tests.simulated.sweep import Schedule, Simulation

SEED = 56
MEASURED_TIMES = ("cost/device_s", "data/wait_frac")  # by a clock that is not simulated
NUMBERS = count()
FAULTS = st.sampled_from([(part, way) for part, ways in WAYS.items() for way in ways]).flatmap(
    lambda named: st.builds(
        Fault,
        component=st.just(named[0]),
        way=st.just(named[1]),
        after=st.integers(0, 30) | st.integers(0, 250),
        times=st.integers(1, 12),
    )
)
SCHEDULES = st.builds(
    Schedule,
    faults=st.lists(FAULTS, min_size=1, max_size=5).map(tuple),
    refused=st.sampled_from(["", "", "log_inputs", "log_artifact"]),
)


class Sweeps:
    """Runs schedules, each in a folder of its own, and compares them with the undisturbed sweep."""

    def __init__(self, home: Path) -> None:
        self._home = home
        numbers = [packing.Sample(png(np.full((8, 8), n)), n % 10, f"grey-{n}") for n in range(24)]
        self.data = str(home / "data")
        packing.write_shards(self.data, map(str, range(10)), {"train": numbers[:20], "val": numbers[20:]})
        undisturbed = self.simulation(Schedule())
        assert undisturbed.run() == []
        self._losses = undisturbed.losses()
        assert self._losses["a"][-1][:2] == (6, 48)
        self.seconds = dict[Schedule, float]()

    def simulation(self, schedule: Schedule, **store: Any) -> Simulation:
        (home := self._home / f"schedule-{next(NUMBERS)}").mkdir()
        return Simulation(home, self.data, schedule, **store)

    def wrong(self, schedule: Schedule) -> list[str]:
        began = time.process_time()
        found = self.simulation(schedule).run(self._losses)
        self.seconds[schedule] = time.process_time() - began
        return found


@pytest.fixture(scope="module")
def sweeps(tmp_path_factory: pytest.TempPathFactory) -> Sweeps:
    return Sweeps(tmp_path_factory.mktemp("sweeps"))


def search(sweeps: Sweeps, examples: int) -> None:
    """Fails with the smallest schedule after which something is wrong."""

    @seed(SEED)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=[*HealthCheck],
    )
    @given(SCHEDULES)
    def disturbed(schedule: Schedule) -> None:
        assert sweeps.wrong(schedule) == [], schedule

    disturbed()
    spent = sweeps.seconds.values()
    logging.getLogger(__name__).info("%d schedules, %.1f per second", len(spent), len(spent) / sum(spent))


def keeps_back_what_follows(patched: pytest.MonkeyPatch) -> None:
    """What the tracker refuses keeps everything behind it back."""
    part = base.Follower.part

    def one_for_all(self: Any, shown: Any, name: str, send: Callable[..., None], *args: Any) -> bool:
        if not part(self, shown, name, send, *args):
            raise ConnectionError(f"{name} was refused")
        return True

    patched.setattr(base.Follower, "part", one_for_all)


def refused_is_refused_for_ever(patched: pytest.MonkeyPatch) -> None:
    part = base.Follower.part

    def never_again(self: Any, shown: Any, name: str, send: Callable[..., None], *args: Any) -> bool:
        return (shown.directory, name) not in self._missing and part(self, shown, name, send, *args)

    patched.setattr(base.Follower, "part", never_again)


def loses_what_it_read(patched: pytest.MonkeyPatch) -> None:
    """A reader that has advanced before a request that failed goes on from there."""
    readers = dict[str, ScalarReader]()
    patched.setattr(sync, "ScalarReader", lambda folder: readers.setdefault(folder, ScalarReader(folder)))
    in_new_process(patched, readers.clear)


def result_before_its_metrics(patched: pytest.MonkeyPatch) -> None:
    """A result is there before its metrics are on the disk."""
    patched.setattr(LineWriter, "flush", lambda self: None)


def checkpoint_before_its_reports(patched: pytest.MonkeyPatch) -> None:
    """A checkpoint is there before the reports that it contains."""
    save, report = worker.Worker.save, worker.Worker.report
    late: list[Any] = []

    def reported(self: Any, step: int, values: Any) -> None:
        writer = self.metrics_file
        self.metrics_file = None
        report(self, step, values)
        self.metrics_file = writer
        late.append((step, self.progress.metrics))

    def saved(self: Any, step: int) -> None:
        save(self, step)
        for row in late:
            self.metrics_file.report(*row)
        late.clear()

    patched.setattr(worker.Worker, "report", reported)
    patched.setattr(worker.Worker, "save", saved)
    in_new_process(patched, late.clear)


def leaves_its_lock(patched: pytest.MonkeyPatch) -> None:
    @contextmanager
    def forgotten(file: Any) -> Iterator[None]:
        with real(file):
            yield
        Path(file.name).write_text(json.dumps({"host": "here", "pid": 1}))

    real = lock._signs_of_life
    patched.setattr(lock, "_signs_of_life", forgotten)


def killed_stays_killed(patched: pytest.MonkeyPatch) -> None:
    send = sync.Sync._send_status

    def once(self: Any, mirror: Any, shown: Any) -> None:
        if mirror.status != "KILLED":
            send(self, mirror, shown)

    patched.setattr(sync.Sync, "_send_status", once)


def repeats_numbers(patched: pytest.MonkeyPatch) -> None:
    """Numbers that a resumed run repeats are sent again."""
    new = ScalarReader.new
    patched.setattr(ScalarReader, "new", lambda self, of, last: new(self, of, {}))


def forgets_what_ran(patched: pytest.MonkeyPatch) -> None:
    """What a killed process had run is not charged."""
    save = BudgetTracker.save

    def without(self: Any) -> None:
        running, self._running = self._running, {}
        save(self)
        self._running = running

    patched.setattr(BudgetTracker, "save", without)


def believes_every_pace(patched: pytest.MonkeyPatch) -> None:
    """Found by this file: a pace without steps, which no logarithm takes, ended each later command."""

    def charge(self: Any, held_s: float, usd: float, pace: Any) -> None:
        self.spent_s += held_s
        self._ended += pace

    patched.setattr(BudgetTracker, "_charge", charge)


def in_new_process(patched: pytest.MonkeyPatch, forget: Callable[[], None]) -> None:
    live = Machine.live

    def anew(self: Machine, command: Callable[[], None]) -> BaseException | None:
        forget()
        return live(self, command)

    patched.setattr(Machine, "live", anew)


def after(*faults: tuple[Any, str, int], refused: str = "") -> Schedule:
    return Schedule(tuple(Fault(*fault) for fault in faults), refused)


# The schedules to which the search had shrunk what it found, at places that may lie a few operations apart in
# another version.
DEFECTS = {
    leaves_its_lock: [after()],
    keeps_back_what_follows: [after(refused="log_inputs")],
    refused_is_refused_for_ever: [after(("tracker", "refuses", 2))],
    loses_what_it_read: [after(("tracker", "fails", at)) for at in range(5, 20)],
    result_before_its_metrics: [after(("driver", "power", at)) for at in range(60, 120, 4)],
    checkpoint_before_its_reports: [after(("driver", "killed before", at)) for at in range(85, 130)],
    killed_stays_killed: [after(("driver", "killed before", at)) for at in range(40, 100, 4)],
    repeats_numbers: [after(("driver", "killed before", at)) for at in range(40, 100, 3)],
    forgets_what_ran: [after(("driver", "killed before", at)) for at in range(100, 140, 4)],
    believes_every_pace: [
        after(("trial", "killed after", at), ("signal", "term", 14)) for at in range(12, 24)
    ],
}


@pytest.mark.smoke
@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.__name__)
def test_a_defect_is_found(
    defect: Callable[[pytest.MonkeyPatch], None], sweeps: Sweeps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a schedule that finds nothing without it."""
    with monkeypatch.context() as patched:
        defect(patched)
        found = next((schedule for schedule in DEFECTS[defect] if sweeps.wrong(schedule)), None)
    assert found is not None
    assert sweeps.wrong(found) == []


@pytest.mark.smoke
def test_the_store_in_memory_is_like_mlflow(
    sweeps: Sweeps, empty_store: Callable[[Path], str], tmp_path: Path
) -> None:
    """The same sweep leaves the same runs in both, to the millisecond."""
    tracking = open_tracking(empty_store(tmp_path), artifacts=str(tmp_path / "artifacts"))
    memory, database = (
        sweeps.simulation(Schedule()),
        sweeps.simulation(Schedule(), store=tracking.client, experiment_id=tracking.experiment_id),
    )
    assert memory.run() == database.run() == []
    assert shown(memory) == shown(database)


def shown(of: Simulation) -> Any:
    """Everything that a store has, without what two sweeps differ in: ids, keys and places."""
    found = {}
    for run in of.store.search_runs([of.tracking.experiment_id], f"tags.`{KEY}` LIKE '%'"):
        tags = {name for name in run.data.tags if not name.startswith((sync.MEASURED, "mlflow.user"))}
        history = {
            name: sorted(
                (row.step, row.timestamp, row.value)
                for row in of.store.get_metric_history(run.info.run_id, name)
            )
            for name in run.data.metrics
            if name not in MEASURED_TIMES and not name.startswith("perf/")
        }
        found[run.info.run_name] = [
            run.info.status,
            run.info.start_time,
            run.info.end_time,
            sorted(tags),
            {name: value for name, value in run.data.params.items() if name != "storage"},
            history,
            [each.dataset.name for each in run.inputs.dataset_inputs],
        ]
    return found


@pytest.mark.smoke
def test_ten_schedules(sweeps: Sweeps) -> None:
    search(sweeps, 10)


@pytest.mark.slow
def test_a_thousand_schedules(sweeps: Sweeps) -> None:
    search(sweeps, 1000)

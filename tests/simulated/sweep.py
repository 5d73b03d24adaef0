"""A sweep on a simulated machine: all of the real control plane, around a training that adds up numbers.

Real are the driver, its lock, budget, queue and directories, the record that a worker keeps and the order in
which it writes, checkpoints but for their tensors, trackers and MLflow's follower. Ray's part, the maths, and
the drawing of pictures are replaced. Everything runs in one thread, so a schedule is repeated exactly.
"""

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from mlflow.exceptions import MlflowException

from orchestrator import storage
from orchestrator.checkpoint import manager, manifest as manifests
from orchestrator.config import RunConfig
from orchestrator.errors import UsageError, reason_of
from orchestrator.runs import notice
from orchestrator.runs.lock import holder_of
from orchestrator.runs.measurements import measurements, write_measurement
from orchestrator.runs.metrics_file import METRICS, MetricsWriter, read_metrics
from orchestrator.runs.run_directory import RunDir
from orchestrator.runs.state import directory_state
from orchestrator.runs.sweep_directory import SweepDir
from orchestrator.sweeps import driver, publish, run as sweep_run
from orchestrator.sweeps.budget import SAVE_EVERY_S
from orchestrator.sweeps.driver import SweepOptions
from orchestrator.sweeps.engine import RESTARTS
from orchestrator.sweeps.queue import Job, TrialQueue
from orchestrator.sweeps.sweep import Sweep
from orchestrator.tracking import base, sync
from orchestrator.tracking.base import unsent
from orchestrator.tracking.find import KEY, record_of
from orchestrator.tracking.lost import set_right
from orchestrator.tracking.sync import MEASURED, REMOVABLE
from orchestrator.training import fit as fit_file, loop, worker
from orchestrator.training.metrics import CostCounters, Meter
from tests.made_directories import run_at
from tests.simulated.machine import Fault, Machine, Requests, TrialKilled
from tests.simulated.store import EXPERIMENT_ID, MemoryStore, SimulatedTracking

STEPS, STEP_S = 6, 40.0  # a report of a trial is later than `SAVE_EVERY_S` after the one before
ARMS = {"a": {}, "b": {"model.width": 32}}
NUMBER = "weights-00000-000.0000000a.safetensors"
LABELS = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED", "lost": "KILLED"}
EXPECTED = (OSError, UsageError, MlflowException)  # ways in which a disturbed command may end
assert STEP_S > SAVE_EVERY_S


@dataclass(frozen=True)
class Schedule:
    """Faults, one after the other; `refused`: a request that the tracker never allows; empty: none."""

    faults: tuple[Fault, ...] = ()
    refused: str = ""


class _Worker(worker.Worker):
    """A worker whose model is one number."""

    def __init__(self, run: RunConfig, report: worker.Report, until: int) -> None:
        self.run, self._report, self._read = run, report, lambda *_: iter(())
        self.device = torch.device("cpu")
        made: Any = SimpleNamespace(x=torch.zeros(())), SimpleNamespace(state={})
        self.model, self.optimizer = made
        self.average = self.fewshot = None
        self.first = True
        nothing: Any = SimpleNamespace(epoch=lambda: 0, steps=lambda: range(0))
        self.training = self.validation = nothing
        self.checkpoints = manager.Checkpoints(RunDir.of(run).checkpoints, run.checkpoint)
        self.signature: Any = None
        self._pauses_at = None
        self.done, self.progress, self._resumed = self._begin()
        self.metrics_file = MetricsWriter(run)
        if self.done:
            self.metrics_file.resumed(self.done)
        self.meter = Meter(workers=1, device_s=self.progress.device_s)
        self.counters = CostCounters((), self.device)
        self.flops_per_image = 1.0
        self.utilization: Any = SimpleNamespace(read=dict)
        same: Any = SimpleNamespace(training=iter, gather=lambda: (7, []), traffic=dict)
        self.samples = same

    def validate(self) -> dict[str, float]:
        x = float(self.model.x)  # pyright: ignore[reportArgumentType]
        return {self.run.task.quality: 1 / (1 + abs(x)), "val/loss": x}

    def _batches(self, stream: Any, steps: range) -> Iterator[Any]:
        return ([step] for step in steps)


class Simulation:
    """A sweep in the folder `home`, disturbed by a schedule.

    Attributes:
        store: what the tracker has; `MemoryStore`, or the client of a real store.
        wrong: what readers would find wrong, in words.
    """

    def __init__(self, home: Path, data: str, schedule: Schedule, store: Any = None, **real: str) -> None:
        run = run_at(
            home, "sweep", data__path=data, train__steps=STEPS, train__report_every=1, train__eval_every=3,
            checkpoint__every=2, checkpoint__asynchronous=False,
        )  # fmt: skip
        self.sweep = Sweep(base=run, arms=ARMS)
        self.directory = RunDir.of(run).path
        self.machine = Machine(home, self.directory, schedule.faults, schedule.refused)
        self.schedule = schedule
        self.store = MemoryStore() if store is None else store
        self.tracking = SimulatedTracking(
            uri="simulated", experiment_id=real.get("experiment_id", EXPERIMENT_ID), has_models=False,
            requests=Requests(self.machine, self.store),
        )  # fmt: skip
        self._followings: list[_Following] = []
        self._hooks: Any = None
        self._fired_before_last_update = 0
        self.trained = 0  # steps

    def run(self, reference: Mapping[str, Any] | None = None) -> list[str]:
        """Runs the command until its faults are over, then once more, and returns what is wrong.
        `reference`: `losses` of the undisturbed sweep.
        """
        wrong: list[str] = []
        with self.machine.in_place(), self._replaced():
            for _ in range(len(self.schedule.faults) + 1):
                ended = self.machine.live(self._command)
                if isinstance(ended, Exception) and not isinstance(ended, EXPECTED):
                    raise ended
                if ended is None and self.machine.fired == self._fired_before_last_update:
                    wrong += self._tracker()
                if not self.machine.faults and self.machine.idle:
                    break
            self.machine.calm()
            if ended := self.machine.live(self._command):
                return [*wrong, f"the last command ended by {ended!r}"]
            lines = unsent(self.directory)
            if bool(lines) != bool(self.schedule.refused and self.machine.was_refused):
                wrong.append(f"the last command said {lines}")
        return [*wrong, *self._files(reference or {}), *self._tracker()]

    def losses(self) -> dict[str, Any]:
        return {
            name: [
                (row.step, row.images, row.metrics["train/loss"]) for row in read_metrics(RunDir.of(run).path)
            ]
            for name, run in self.sweep.runs().items()
        }

    def _command(self) -> None:
        """What a user runs: the sweep, then an evaluation of one of its models."""
        self._followings.clear()
        set_right(self.tracking)
        driver.run_sweep(self.sweep, SweepOptions(), progress=False, store=self.tracking)
        trial = RunDir.of(self.sweep.runs()["a"]).path
        if not measurements(trial):
            write_measurement(trial, {"eval/digits/acc1": 0.25})
        sync.send(self.directory, self.tracking, only={trial})

    def _tick(self) -> None:
        """Lets the driver do what it does every few seconds."""
        was, self.machine.in_trial = self.machine.in_trial, False
        try:
            if self._hooks:
                self._hooks.follow()
            for following in self._followings:
                following._update(live=not notice.given())
        except Exception as error:
            raise _DriverError(error) from error
        self.machine.in_trial = was

    def _train_step(
        self, model: Any, _: Any, batch: list[int], run: RunConfig, **__: Any
    ) -> dict[str, torch.Tensor]:
        self.machine.wait(STEP_S)
        self.trained += 1
        model.x = 0.9 * model.x + batch[0] + 1
        self._tick()
        return {"train/loss": model.x.clone(), "train/grad_norm": torch.ones(())}

    def _run_jobs(self, queue: TrialQueue, hooks: Any) -> None:
        self._hooks = hooks
        with notice.saving():
            while job := queue.next():
                hooks.began(job)
                outcome = self._outcome(job, hooks)
                if isinstance(outcome, notice.Stopped):
                    queue.release(job.trial.name)
                else:
                    queue.done(job.trial.name, outcome)
        self._hooks = None
        if notice.given():
            raise notice.Stopped({})

    def _outcome(self, job: Job, hooks: Any) -> Any:
        for _ in range(RESTARTS + 1):
            self.machine.in_trial = True
            try:
                return self._trial(job)
            except TrialKilled:
                hooks.began(job)
            except _DriverError as error:
                raise error.cause from None
            finally:
                self.machine.trial_ended()
        return "its process died"

    def _trial(self, job: Job) -> Any:
        """As `engine.train_trial`."""
        try:
            return fit_file.fit(job.trial.run, until=job.until)
        except notice.Stopped as stopped:
            return stopped
        except Exception as error:
            if not isinstance(error, EXPECTED):
                raise _DriverError(error) from error
            try:
                storage.write_bytes(RunDir.of(job.trial.run).error_file, repr(error).encode())
            except OSError:
                raise TrialKilled from None
            return reason_of(error)

    @contextmanager
    def _replaced(self) -> Iterator[None]:
        def train(run: RunConfig, *, report: Any, until: int | None, should_stop: Any, **_: Any) -> None:
            last = min(until or run.train.steps, run.train.steps)
            _Worker(run, report, last).train(last, should_stop)

        def write(attempt: str, token: str, state: Mapping[str, torch.Tensor], *_: Any) -> dict[str, Any]:
            storage.make_folder(attempt)
            with storage.open_to_write(path := storage.join(attempt, NUMBER)) as file:
                file.write(str(float(state["x"])).encode())
            return {NUMBER: manifests.hashed(path)}

        def load(folder: str, manifest: Any, model: Any, *_: Any, **__: Any) -> None:
            manifests.check_files(folder, manifest.files, manifest)
            model.x = torch.tensor(float(storage.read_bytes(storage.join(folder, NUMBER))))

        def draw(frontier: Any, folder: str) -> list[str]:
            text = json.dumps([(point.arm, point.quality) for point in frontier.points])
            for name in publish.FILES:
                storage.write_bytes(storage.join(folder, name), text.encode())
            return [*publish.FILES]

        pool = SimpleNamespace(map=lambda *args: list(map(*args)))
        with ExitStack() as stack:
            for where, name, to in (
                (driver, "preflight", lambda *_, **__: []),
                (driver, "SystemMetrics", lambda *_: nullcontext()),
                (driver, "linear_baseline", lambda _: {}),
                (sweep_run, "most_resources", lambda: {"CPU": 2.0}),
                (sweep_run, "run_jobs", self._run_jobs),
                (sweep_run, "ThreadPoolExecutor", lambda *_: pool),
                (base, "Following", partial(_Following, self)),
                (publish, "write_files", draw),
                (fit_file, "check_data", lambda _: None),
                (fit_file, "train_worker", train),
                (worker, "set_weights", lambda *_: None),
                (loop, "train_step", self._train_step),
                (manager, "state_of", lambda model, _: {"x": model.x}),
                (manager, "write", write),
                (manager, "load_state", load),
            ):
                stack.enter_context(patch.object(where, name, to))
            yield

    def _files(self, reference: Mapping[str, Any]) -> list[str]:
        """What is wrong in the directory after the end."""
        wrong, own = [], SweepDir(self.directory)
        if (state := directory_state(self.directory)) != "finished":
            wrong.append(f"the sweep is {state}")
        for folder in (self.directory, storage.join(self.directory, publish.REPORT)):
            if holder_of(folder):
                wrong.append(f"a lock is left in {folder}")
        for name, run in self.sweep.runs().items():
            trial = RunDir.of(run)
            result, rows = trial.result(), read_metrics(trial.path)
            if [row.step for row in rows] != [*range(1, STEPS + 1)]:
                wrong.append(f"{name} has reports of steps {[row.step for row in rows]}")
            if reference and self.losses()[name] != reference[name]:
                wrong.append(f"{name} has losses {self.losses()[name]}")
            for line in storage.read_bytes(trial.file(f"{METRICS}.jsonl")).splitlines():
                json.loads(line)
            if result is None or (result.status, result.step) != ("finished", STEPS):
                wrong.append(f"{name} has the result {result}")
            elif rows and result.metrics != rows[-1].metrics:
                wrong.append(f"the result of {name} is not its last report")
            else:
                manifests.verify_checkpoint(trial.file(result.checkpoint))
            if (state := directory_state(trial.path)) != "finished":
                wrong.append(f"{name} is {state}")
        lost = 2 * STEP_S * len(self.schedule.faults) + STEP_S  # what no process lived to write down
        paid = json.loads(storage.read_bytes(own.spent))
        spent, by_month = paid["device_s"], sum(sum(of.values()) for of in paid["months"].values())
        if abs(spent - by_month) > 1e-6:
            wrong.append(f"{spent} device-seconds are charged, and {by_month} of them to a month")
        if spent + lost * bool(self.schedule.faults) < self.trained * STEP_S:
            wrong.append(f"{spent} of {self.trained * STEP_S} device-seconds are charged")
        return wrong

    def _tracker(self) -> list[str]:
        """What the tracker has otherwise than the directories."""
        wrong, store, seen = [], self.store, 0
        record = SweepDir(self.directory).record()
        assert record
        members = SweepDir(self.directory).summary().get("pareto", [])
        places = {self.directory: ""} | {
            SweepDir(self.directory).trial(t).path: n for n, t in record.trials.items()
        }
        for directory, trial in places.items():
            if (own := record_of(directory)) is None:
                continue
            what = trial or "the sweep"
            found = store.search_runs([self.tracking.experiment_id], f"tags.`{KEY}` = '{own.key}'")
            if len(found) != 1:
                wrong.append(f"{what} is {len(found)} runs")
                continue
            (run,), seen = found, seen + 1
            tags, state = run.data.tags, directory_state(directory)
            if run.info.status != LABELS.get(str(state)):
                wrong.append(f"{what} is {run.info.status}, and {state}")
            if tags["directory"] != directory:
                wrong.append(f"{what} is shown at {tags['directory']}")
            if state == "finished" and (
                left := [n for n in REMOVABLE if n in tags and n[:4] not in ("pare", "data")]
            ):
                wrong.append(f"{what} has the tags {left}")
            if not trial:
                if self.schedule.refused != "log_artifact":
                    wrong += self._artifacts(run.info.run_id)
                continue
            if ("pareto" in tags) != (trial in members):
                wrong.append(f"{trial} is wrongly of the frontier, or not")
            if not run.data.params or run.data.params["name"] != RunDir(directory).record().config["name"]:  # pyright: ignore
                wrong.append(f"{trial} has no params")
            if not run.inputs.dataset_inputs and self.schedule.refused != "log_inputs":
                wrong.append(f"{trial} has no data set")
            wrong += self._numbers(run.info.run_id, directory, trial)
            for measured in measurements(directory):
                if tags.get(MEASURED + measured.id) != measured.id:
                    wrong.append(f"{trial} lacks a measurement")
                rows = store.get_metric_history(run.info.run_id, "eval/digits/acc1")
                if [row.value for row in rows] != [0.25]:
                    wrong.append(f"the measurement is {rows}")
        everything = store.search_runs([self.tracking.experiment_id], f"tags.`{KEY}` LIKE '%'")
        if len(everything) != seen:
            wrong.append(f"the tracker has {len(everything)} runs of {seen} directories")
        return wrong

    def _numbers(self, run_id: str, directory: str, trial: str) -> list[str]:
        wrong, rows = [], read_metrics(directory)
        for name in ("train/loss", "val/loss", "val/acc1", "cost/train_flops_6mac"):
            there = [(row.step, row.value) for row in self.store.get_metric_history(run_id, name)]
            known = [(row.images, row.metrics[name]) for row in rows if name in row.metrics]
            if sorted(there) != known:
                wrong.append(f"{name} of {trial} is {there}, and {known}")
        return wrong

    def _artifacts(self, run_id: str) -> list[str]:
        wrong = []
        with tempfile.TemporaryDirectory() as folder:
            for name in SweepDir(self.directory).summary().get("files", ()):
                try:
                    path = self.store.download_artifacts(run_id, name, folder)
                except (KeyError, OSError, MlflowException):
                    wrong.append(f"{name} is missing in the tracker")
                    continue
                if Path(path).read_bytes() != storage.read_bytes(storage.join(self.directory, name)):
                    wrong.append(f"{name} is another file in the tracker")
        return wrong


class _DriverError(BaseException):
    """What the driver raised beside a trial, which knows nothing of it."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(cause)
        self.cause = cause


class _Following(base.Following):
    """Updates when the simulation says so, in place of a thread."""

    def __init__(self, simulation: Simulation, follower: base.Follower, say: Callable[[str], None]) -> None:
        super().__init__(follower, say)
        self._simulation = simulation

    def __enter__(self) -> Any:
        base._unsent.pop(self._follower.directory, None)
        self._simulation._followings.append(self)
        return self

    def __exit__(self, *error: Any) -> None:
        self._simulation._followings.remove(self)
        self._simulation._fired_before_last_update = self._simulation.machine.fired
        self._update(live=False)
        super().__exit__(*error)

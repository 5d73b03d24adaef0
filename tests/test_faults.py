"""Faults of whole machines, one after another on one cluster: the run goes on, repeats no more than it must,
and has the losses of an undisturbed run. When all were tried, docs/faults.md is written.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from orchestrator import load_plugins
from orchestrator.codec import override, read_config
from orchestrator.config import RunConfig
from orchestrator.runs.metrics_file import read_metrics
from orchestrator.runs.run_directory import RunDir
from orchestrator.training.fit import fit
from tests.faults import FAULTS, Fault
from tests.faulty import (
    EVERY,
    NEVER_S,
    NOTICED,
    PACE_S,
    PLUGIN,
    STEPS,
    WORKER,
    Cluster,
    Lines,
    Records,
    Run,
    small_disk,
)
from tests.machines import ROOT, machines

pytestmark = [pytest.mark.machines, pytest.mark.timeout(1200)]
SAME = 1e-4  # relative: three workers round otherwise than one
TWICE = "select count(*) - count(distinct (run_uuid, step)) from metrics where key = 'train/loss'"
PAGE = ROOT / "docs/faults.md"
HEAD = """# Faults

What a run does when a machine, a network, a disk or a service fails. `make test-machines` made each of these
faults happen, asserted what the run did, and wrote this page.

The machines are namespaces of one computer ({computer}): a head with the driver,
three nodes of two CPUs, and one with the tracking server (on Postgres), S3, and Redis, in which Ray's control
server keeps its state. One run at a time trains on them: a model with 6 experts that 3 workers share, or a
sweep of three trials, one of which has 2 workers. A step takes {pace} s and what it computes; a checkpoint is
saved every {every} steps.

- **Moment**: between checkpoints, while one is being written, while the run starts again because a worker
  was killed, or while the trials of a sweep train. The storage is a folder that all machines share, or S3.
- **Noticed**: seconds until the driver says something about it, or ends. A run that stands still says so
  after 30 s, and a fault that is over before is not noticed (-).
- **Outcome**: a run that goes on does so without a restart. One that restarts does it by itself, from its
  last checkpoint. Where the driver ends, the same command is given again.
- **Repeated**: steps that were trained again; those of a sweep are added up.
- **Difference**: the largest between the losses after the fault, of so many steps, and those of one worker
  that trained undisturbed, relative to them. No step was recorded twice, in `metrics.jsonl` or in MLflow.

| fault | moment | noticed (s) | outcome | repeated | steps compared | difference |
|---|---|--:|---|--:|--:|--:|
"""
FOOT = """
These are {rows} faults, {steps:,} compared steps and {minutes} minutes. Most of a restart is the start of
Python on few cores.
"""


@dataclass(frozen=True)
class Row:
    fault: Fault
    noticed_s: float | None
    outcome: str
    repeated: int
    compared: int
    difference: float

    def __str__(self) -> str:
        noticed = "-" if self.noticed_s is None else f"{self.noticed_s:.1f}"
        cells = (self.fault.name, self.fault.moment, noticed, self.outcome, self.repeated, self.compared)
        return f"| {' | '.join(map(str, cells))} | {self.difference:.1g} |"


class Lab:
    """A cluster, the run that it trains now, and the same runs undisturbed, which this process trains."""

    def __init__(self, cluster: Cluster, alone: Path) -> None:
        self.cluster, self.alone = cluster, alone
        self.now: Run | None = None
        self.rows: list[Row] = []
        self.began_s = time.monotonic()

    def use(self, name: str) -> Run:
        """Lets this run, and no other, train. It has saved a checkpoint since it last began: deaths without
        one between them add up.
        """
        run = self.cluster.runs[name]
        if self.now is not run:
            self.stop()
        if run.driver is None or run.driver.process.poll() is not None:
            self.now, run.driver = run, self.cluster.start(run)
        self.until(
            lambda: all(last(rows) > begun(rows) + EVERY + STEPS for rows in run.records().values()), run
        )
        self.goes_on(run, run.records())
        return run

    def stop(self) -> None:
        if self.now and self.now.driver and self.now.driver.process.poll() is None:
            self.now.driver.signal(signal.SIGTERM)
            self.now.driver.wait()

    def until(self, done: Callable[[], bool], run: Run, *, every: float = 0.3) -> None:
        assert run.driver
        deadline = time.monotonic() + NEVER_S
        while not done():
            said = "\n".join(line for _, line in run.driver.lines[-30:])
            assert run.driver.process.poll() is None, f"the driver has ended: {said}"
            assert time.monotonic() < deadline, f"not within {NEVER_S} s: {said}"
            time.sleep(every)

    def goes_on(self, run: Run, before: Records, *, restarted: bool = False) -> None:
        """Waits until each training has reported some steps more than `before`, one after a restart."""

        def done() -> bool:
            new = since(before, run.records()).values()
            ends = [max((i for i, row in enumerate(rows) if "resumed" in row), default=-1) for rows in new]
            enough = all(len(rows) > end + STEPS for rows, end in zip(new, ends, strict=True))
            return enough and (max(ends) >= 0 or not restarted)

        self.until(done, run)

    def restart(self, run: Run) -> None:
        """Lets the run begin to start again."""
        assert run.driver
        lines, old = run.driver.lines, self.workers()
        said = len(lines)
        next(iter(old)).kill()
        self.until(lambda: any("restart from" in line for _, line in lines[said:]), run)
        self.until(lambda: bool(self.workers() - old), run)

    def workers(self) -> set[psutil.Process]:
        return {process for found in self.cluster.busy(WORKER).values() for process in found}

    def try_out(self, fault: Fault) -> Row:
        moment, _, on_s3 = fault.moment.partition(" on ")
        self.cluster.heal()
        run = self.use("sweep" if moment == "sweep" else f"training{' on S3' if on_s3 else ''}")
        assert run.driver
        driver, before = run.driver, run.records()
        if moment == "restart":
            self.restart(run)
        act = fault.act(self.cluster, run)
        next(act)
        if moment == "checkpoint":
            known = run.unfinished()
            self.until(lambda: bool(run.unfinished() - known), run, every=0.01)
        said, struck = len(driver.lines), time.monotonic()
        next(act, None)
        mended, outcome, ended = run.records(), "goes on", []
        if fault.expected == "ends":
            code = driver.wait()
            outcome = f"ends with {code if code >= 0 else 128 - code}; the same command goes on"
            ended = [time.monotonic()]
            run.driver = self.cluster.start(run)
        restarted = fault.expected != "goes on"
        self.goes_on(run, before if restarted else mended, restarted=restarted)
        after = since(before, run.records())
        repeated, restarts = steps_repeated(before, after)
        if restarts and not ended:
            outcome = f"restarts, on {len(self.cluster.busy(run.process))} machines"
        lines = [(at, line) for at, line in driver.lines[said:] if NOTICED.search(line)]
        noticed = next(iter(ended or [at for at, _ in lines]), None)
        row = Row(fault, noticed and noticed - struck, outcome, repeated, *self.compared(after))
        self.rows.append(row)
        self.write(self.cluster.folder / "faults.md")
        print(f"\n{row}", *(f"{at - struck:6.1f} s  {line[:200]}" for at, line in lines), sep="\n")
        return row

    def compared(self, after: Records) -> tuple[int, float]:
        """Trains the same without faults as far as needed. Returns how many reports were compared, and the
        largest relative difference of their losses.
        """
        differences = []
        for directory, rows in after.items():
            record = RunDir(directory).record()
            assert record
            name = directory.rpartition("/")[2]
            changes = {"name": name, "storage": str(self.alone), "scale.workers": 1, "scale.ep": 1}
            run = override(read_config(RunConfig, record.config), changes)
            reports = [(row["step"], row["metrics"]["train/loss"]) for row in rows if "metrics" in row]
            losses = self.losses(run, max(step for step, _ in reports))
            differences += [abs(loss - losses[step]) / losses[step] for step, loss in reports]
        return len(differences), max(differences)

    def losses(self, run: RunConfig, until: int) -> dict[int, float]:
        own = RunDir.of(run)
        if until > max((row.step for row in read_metrics(own.path)), default=0):
            fit(run, until=until)
        return {row.step: row.metrics["train/loss"] for row in read_metrics(own.path)}

    def twice(self) -> int:
        """How many steps are there twice, in files and in MLflow."""
        records = self.now.records().values() if self.now else ()
        return sum(map(doubled, records)) + int(self.cluster.postgres.ask(TWICE))

    def write(self, page: Path) -> None:
        memory = psutil.virtual_memory().total / 2**30
        computer = f"{os.cpu_count()} cores, {memory:.0f} GiB of memory"
        minutes = (time.monotonic() - self.began_s) / 60
        steps = sum(row.compared for row in self.rows)
        head = HEAD.format(computer=computer, pace=PACE_S, every=EVERY)
        foot = FOOT.format(rows=len(self.rows), steps=steps, minutes=f"{minutes:.0f}")
        page.write_text(head + "".join(f"{row}\n" for row in self.rows) + foot)


def last(rows: Lines) -> int:
    return max(counted(rows), default=0)


def begun(rows: Lines) -> int:
    """The step from which the last attempt began."""
    return next((row["resumed"] for row in reversed(rows) if "resumed" in row), 0)


def since(before: Records, now: Records) -> Records:
    return {directory: rows[len(before.get(directory, ())) :] for directory, rows in now.items()}


def steps_repeated(before: Records, after: Records) -> tuple[int, int]:
    """Returns how many steps were taken back, and how often."""
    repeated = restarts = 0
    for directory, rows in after.items():
        at = last(before[directory])
        for row in rows:
            if "resumed" in row:
                repeated, restarts = repeated + max(0, at - row["resumed"]), restarts + 1
            at = row.get("resumed", row.get("step"))
    return repeated, restarts


def counted(rows: Lines) -> list[int]:
    """The steps of the reports that count."""
    steps: list[int] = []
    for row in rows:
        if "resumed" in row:
            steps = [step for step in steps if step <= row["resumed"]]
        else:
            steps.append(row["step"])
    return steps


def doubled(rows: Lines) -> int:
    steps = counted(rows)
    return len(steps) - len(set(steps))


@pytest.fixture(scope="module")
def lab(digits: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    load_plugins([PLUGIN])
    folder = tmp_path_factory.mktemp("faults")
    with ExitStack() as stack:
        stack.enter_context(small_disk(folder / "storage"))
        found = stack.enter_context(machines(5))
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        cluster = Cluster(found, folder, digits, stack)
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL"):
            patch.setenv(name, cluster.env[name])
        lab = Lab(cluster, folder / "alone")
        yield lab
        lab.stop()
        if len(lab.rows) == len(FAULTS):
            lab.write(PAGE)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_run_goes_on(fault: Fault, lab: Lab) -> None:
    row = lab.try_out(fault)
    assert row.outcome.startswith((fault.expected, *["restarts"] * fault.may_restart))
    assert row.difference < SAME
    assert lab.twice() == 0
    assert row.repeated <= fault.most
    # What happens while a run starts again may be over before it is noticed.
    assert row.noticed_s is not None or fault.expected == "goes on" or fault.moment == "restart"

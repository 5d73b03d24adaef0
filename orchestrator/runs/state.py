"""The state that a run or a sweep is in, from its directory alone."""

from typing import Literal

from orchestrator.runs.lock import Holder, holder_of
from orchestrator.runs.run_directory import RunDir, RunState, Status, kind_of
from orchestrator.runs.sweep_directory import SweepDir, SweepRecord, owner_of

# running   a process works there, and gives signs of life
# lost      a process worked there, and ended without a word: it was killed, or its machine is gone
# stopped   interrupted, or out of its budget: the same command continues
# finished  it has reached its end
# failed    so it has, and it or one of its trials failed or diverged
State = Literal["running", "lost", "stopped", "finished", "failed"]

_OF_RUN: dict[Status, State] = {
    "running": "running",
    "finished": "finished",
    "diverged": "failed",
    "failed": "failed",
    "stopped": "stopped",
    "interrupted": "stopped",
}


def directory_state(directory: str) -> State | None:
    """Returns the state of the run, the sweep or the trial in a directory; None if there is none of them."""
    holder = holder_of(owner_of(directory))  # trials have the lock of their sweep
    if (sweep := SweepDir(directory).record()) is not None:
        return state_of_sweep(sweep, holder)
    if not kind_of(directory):
        return None
    return state_of_run(RunDir(directory), holder)[0]


def state_of_sweep(sweep: SweepRecord, holder: Holder | None) -> State:
    """Returns the state of a sweep whose lock has this holder."""
    if holder and holder.lives:
        return "running"
    own: State = "stopped" if sweep.status == "interrupted" else sweep.status
    return "lost" if own == "running" else own


def state_of_run(run: RunDir, holder: Holder | None) -> tuple[State, RunState]:
    """Returns the state of a run whose lock has this holder, and what it was read from."""
    found = run.state(live=bool(holder and holder.lives))
    own = _OF_RUN[found.status]
    return "lost" if own == "stopped" and holder else own, found

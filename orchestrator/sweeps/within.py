"""A sweep without the arms that cannot keep a bound on their time, which is known before they are trained."""

from collections.abc import Mapping
from dataclasses import replace

from orchestrator.errors import UsageError
from orchestrator.inference.measure import ONE_IMAGE, Say, machine
from orchestrator.inference.planned import PlannedTime, planned_times
from orchestrator.runs.sweep_directory import SweepDir
from orchestrator.sweeps.sweep import Sweep


def arms_within(
    sweep: Sweep, max_ms: float, *, say: Say = lambda line: None
) -> tuple[Sweep, Mapping[str, PlannedTime]]:
    """Returns the sweep without the arms of which a call is planned to take more than so many milliseconds by
    its median, and the time of each arm (`inference.planned`). An arm stays if its time is not known, or its
    training has begun.

    Raises:
        UsageError: if no arm is left, or none can be timed.
    """
    times = planned_times({trial.arm: trial.run for trial in sweep.trials().values()}, say=say)
    if not times:
        raise UsageError(f"no model of {sweep.base.name} can be timed: leave out `max_ms`")
    record = SweepDir.of(sweep.base).record()
    begun = record.arms if record else {}
    slow = [arm for arm, each in times.items() if each.least > max_ms and arm not in begun]
    if slow and len(slow) == len(sweep.arms):
        nearest = min(slow, key=lambda arm: times[arm].least)
        raise UsageError(
            f"no arm takes at most {max_ms:g} ms: the nearest, {nearest}, takes {times[nearest].ms:.3g} ms"
            f" ({ONE_IMAGE}). Give a larger bound, or smaller models"
        )
    if slow:
        named = ", ".join(f"{arm} ({times[arm].ms:.3g} ms)" for arm in slow)
        say(f"left out, because the median call takes more than {max_ms:g} ms on {machine()}: {named}")
    return replace(sweep, arms={arm: each for arm, each in sweep.arms.items() if arm not in slow}), times

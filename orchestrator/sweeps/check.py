"""Whether a sweep can be trained at all, said before anything is."""

from typing import Any

from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.errors import UsageError
from orchestrator.frontier.claims import parse_claim
from orchestrator.sweeps.settings import settings
from orchestrator.sweeps.sweep import Sweep, Trial
from orchestrator.training.fit import check_data, check_start
from orchestrator.training.resources import check_resources, most_resources

QUALITIES = ("val/acc1", "train/acc1")  # to maximise
COSTS = (
    "cost/train_flops_6mac",
    "cost/marginal_train_flops_6mac",
    "cost/device_s",
    "cost/marginal_device_s",
    "cost/forward_gflops_2mac",
    "cost/params",
    "perf/ms_per_image",
)


def check_sweep(sweep: Sweep, *, verify: bool = False) -> None:
    """Checks what needs no cluster. With `verify` all shards are read.

    Raises:
        UsageError: for an arm that is refused, a claim about what the arms do not have, data that is not
            whole, or weights to start from that do not fit.
    """
    check_metrics(sweep)
    check_claims(sweep)
    check_data(sweep.base, verify=verify)
    for name, run in sweep.runs().items():
        try:
            check_start(run)
        except UsageError as error:
            raise UsageError(f"arm {name}: {error}") from None


def check_fits(sweep: Sweep) -> None:
    """Raises UsageError for an arm that the connected cluster can never hold."""
    for name, problem in unfit(sweep).items():
        raise UsageError(f"arm {name}: {problem}")


def unfit(sweep: Sweep) -> dict[str, str]:
    """trial -> why the connected cluster can never hold it, of those that it cannot."""
    most, found = most_resources(), dict[str, str]()
    for name, run in sweep.runs().items():
        try:
            check_resources(run, most)
        except UsageError as error:
            found[name] = str(error)
    return found


def check_metrics(sweep: Sweep) -> None:
    """Raises UsageError for a quality or a cost that no trial will report."""
    fewshot = sweep.base.train.fewshot
    qualities = (*QUALITIES, *(fewshot.metrics() if fewshot else ()))
    for name, metric, known in (("quality", sweep.quality, qualities), ("cost", sweep.cost, COSTS)):
        if metric not in known:
            raise UsageError(f"{name}={metric!r} of a sweep is none of {', '.join(known)}")


def check_claims(sweep: Sweep) -> None:
    """Raises UsageError for a claim that is none, or names what no arm has."""
    runs = sweep.runs()
    known = {"arm"} | {name for run in runs.values() for name in settings(run)}
    for text in sweep.claims:
        try:
            unknown = parse_claim(text).settings() - known
        except ValueError as error:
            raise UsageError(str(error)) from None
        if runs and unknown:
            raise UsageError(f"claim {text!r} names {sorted(unknown)}; the arms have {sorted(known)}")


def retrain_config(sweep: Sweep, trial: Trial) -> RunConfig:
    """The trial's run for twice its steps, on at least two workers, which share the experts between them."""
    changes: dict[str, Any] = {
        "name": f"{sweep.base.name}/confirm/{trial.arm}",
        "train.steps": 2 * trial.run.train.steps,
    }
    if trial.run.scale.workers == 1:
        changes |= {"scale.workers": 2, "scale.ep": 2}
    return override(trial.run, changes)


def check_retrain(sweep: Sweep) -> None:
    """Raises UsageError, before anything is trained, if an arm could not be retrained."""
    if sweep.trunk:
        raise UsageError("cooldown branches are not confirmed: use --confirm 0")
    for trial in sweep.trials().values():
        if trial.run.model.moe:
            try:
                check_resources(retrain_config(sweep, trial))
            except UsageError as error:
                raise UsageError(f"confirming {trial.arm}: {error}; --confirm 0 leaves it out") from None

"""Whether a sweep can be trained at all, said before anything is."""

from orchestrator.errors import UsageError
from orchestrator.frontier.claims import parse_claim
from orchestrator.sweeps.settings import settings
from orchestrator.sweeps.sweep import Sweep
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

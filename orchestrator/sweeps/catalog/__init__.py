"""The named sweeps, each at several scales, and a user's own. To add one: write its file, add its line."""

import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path

from orchestrator.errors import UsageError
from orchestrator.sweeps.catalog.ablations import ablations
from orchestrator.sweeps.catalog.capacity import capacity
from orchestrator.sweeps.catalog.expert_count import expert_count
from orchestrator.sweeps.catalog.pareto import pareto
from orchestrator.sweeps.catalog.quickstart import quickstart
from orchestrator.sweeps.catalog.routers import routers
from orchestrator.sweeps.catalog.scales import SCALES, Scale
from orchestrator.sweeps.catalog.slots_experts import slots_experts
from orchestrator.sweeps.catalog.softmax_combine import softmax_combine
from orchestrator.sweeps.sweep import Sweep

SWEEPS: dict[str, Callable[[Scale], Sweep]] = {
    "quickstart": quickstart,
    "routers": routers,
    "slots_experts": slots_experts,
    "ablations": ablations,
    "pareto": pareto,
    "capacity": capacity,
    "expert_count": expert_count,
    "softmax_combine": softmax_combine,
}


def make_sweep(name: str, scale: str) -> Sweep:
    """A named sweep, or that of a user's own file: ``my_sweep.py:make``, a function of a `Scale`, or of
    nothing.

    Raises:
        UsageError: for a name, a scale, a file or a function that is not there.
    """
    if scale not in SCALES:
        raise UsageError(f"unknown scale {scale!r}; known: {', '.join(SCALES)}")
    make = _from_file(name) if ":" in name else SWEEPS.get(name)
    if make is None:
        raise UsageError(
            f"unknown sweep {name!r}; known: {', '.join(SWEEPS)}, or your own as path/to/file.py:function"
        )
    try:
        sweep = make(SCALES[scale]) if inspect.signature(make).parameters else make()  # pyright: ignore
    except UsageError:
        raise
    except Exception as error:  # somebody's own code
        raise UsageError(f"{name} raises {error!r}") from error
    if not isinstance(sweep, Sweep):
        raise UsageError(f"{name} must return a Sweep, got {type(sweep).__name__}")
    return sweep


def _from_file(name: str) -> Callable[..., Sweep]:
    path, _, function = name.rpartition(":")
    if not Path(path).is_file():
        raise UsageError(f"no file {path}: a sweep of your own is path/to/file.py:function")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # somebody's own code
        raise UsageError(f"{path} raises {error!r}") from error
    if not hasattr(module, function):
        raise UsageError(f"{path} has no function {function!r}")
    if not callable(found := getattr(module, function)):
        raise UsageError(f"{function!r} of {path} is no function, but {found!r}")
    return found  # pyright: ignore[reportReturnType]

"""Find the vision mixture-of-experts model that is worth its cost: train runs and sweeps, load their models.

    from orchestrator import RunConfig, Sweep, digits, override, run_sweep

    base = override(RunConfig(), {"name": "demo", "storage": "/tmp/demo", "data.path": digits("/tmp/demo")})
    frontier = run_sweep(Sweep(base=base, arms={"dense": {}, "soft": {"model.moe.router.kind": "soft"}}))
    print(frontier.to_dataframe())

Names are imported when they are first used, so that `import orchestrator` stays cheap.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.codec import override
    from orchestrator.config import RunConfig
    from orchestrator.evaluation.models import load_model
    from orchestrator.frontier.frontier import Frontier
    from orchestrator.frontier.points import Point
    from orchestrator.plugins import load_plugins
    from orchestrator.sweeps.driver import SweepOptions, digits, run_sweep, train
    from orchestrator.sweeps.run import Watch
    from orchestrator.sweeps.sweep import Sweep
    from orchestrator.training.run_directory import Result

__all__ = [
    "Frontier",
    "Point",
    "Result",
    "RunConfig",
    "Sweep",
    "SweepOptions",
    "Watch",
    "digits",
    "load_model",
    "load_plugins",
    "override",
    "run_sweep",
    "train",
]

_HOMES = {
    "Frontier": "frontier.frontier",
    "Point": "frontier.points",
    "Result": "training.run_directory",
    "RunConfig": "config",
    "Sweep": "sweeps.sweep",
    "SweepOptions": "sweeps.driver",
    "Watch": "sweeps.run",
    "digits": "sweeps.driver",
    "load_model": "evaluation.models",
    "load_plugins": "plugins",
    "override": "codec",
    "run_sweep": "sweeps.driver",
    "train": "sweeps.driver",
}

# Set before torch is loaded, which reads it. Threads that wait for each other at the end of a matmul release
# their core after about 50 us. The default of several ms keeps it from other processes and threads, even from
# the threads that they wait for (measured: bench/results/threads.json).
os.environ.setdefault("GOMP_SPINCOUNT", "2000")


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'orchestrator' has no attribute {name!r}")
    return getattr(importlib.import_module(f"orchestrator.{_HOMES[name]}"), name)

"""Find the vision mixture-of-experts model that is worth its cost: train runs and sweeps, load their models.

    from moe import MoEConfig, SoftConfig
    from orchestrator import RunConfig, Sweep, run_sweep

    arms = {"dense": {}, "soft": MoEConfig(router=SoftConfig()), "wide": {"model.width": 64}}
    frontier = run_sweep(Sweep(base=RunConfig(name="demo"), arms=arms))
    model = frontier.knee.load()

Names are imported when they are first used, so that `import orchestrator` stays cheap.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.codec import override
    from orchestrator.config import (
        CheckpointConfig,
        DataConfig,
        EMAConfig,
        FewShotConfig,
        RunConfig,
        ScaleConfig,
        TrainConfig,
    )
    from orchestrator.costs import Cost
    from orchestrator.data.batch import Batch, normalize
    from orchestrator.data.images import Transform, encode_png
    from orchestrator.data.packing import digits
    from orchestrator.data.samples import Sample, Source
    from orchestrator.errors import UsageError
    from orchestrator.evaluation.models import load_model
    from orchestrator.frontier.frontier import Frontier
    from orchestrator.frontier.points import Point
    from orchestrator.optimizers import AdafactorConfig, AdamWConfig, LambConfig, OptimizerConfig, SGDConfig
    from orchestrator.optimizers.base import decay_groups
    from orchestrator.plugins import load_plugins
    from orchestrator.schedules import (
        ConstantConfig,
        CosineConfig,
        DeitConfig,
        LinearConfig,
        RsqrtConfig,
        ScheduleConfig,
    )
    from orchestrator.sweeps.budget import Budget
    from orchestrator.sweeps.driver import SweepOptions, run_sweep, train
    from orchestrator.sweeps.queue import Job, Policy, TrialState
    from orchestrator.sweeps.run import Watch
    from orchestrator.sweeps.scales import Scale
    from orchestrator.sweeps.scheduler import FrontierScheduler
    from orchestrator.sweeps.search import OptunaSearch, SearchOptions
    from orchestrator.sweeps.stopping import EarlyStopping
    from orchestrator.sweeps.sweep import Sweep, Trunk
    from orchestrator.sweeps.tuning import Tuning, tune
    from orchestrator.tasks import ClassificationConfig, TaskConfig
    from orchestrator.tasks.base import Heads
    from orchestrator.tracking.base import Follower, TrackerConfig
    from orchestrator.tracking.projection import Projection
    from orchestrator.tracking.tensorboard import TensorBoardConfig
    from orchestrator.training.run_directory import Result

__all__ = [
    "AdafactorConfig",
    "AdamWConfig",
    "Batch",
    "Budget",
    "CheckpointConfig",
    "ClassificationConfig",
    "ConstantConfig",
    "CosineConfig",
    "Cost",
    "DataConfig",
    "DeitConfig",
    "EMAConfig",
    "EarlyStopping",
    "FewShotConfig",
    "Follower",
    "Frontier",
    "FrontierScheduler",
    "Heads",
    "Job",
    "LambConfig",
    "LinearConfig",
    "OptimizerConfig",
    "OptunaSearch",
    "Point",
    "Policy",
    "Projection",
    "Result",
    "RsqrtConfig",
    "RunConfig",
    "SGDConfig",
    "Sample",
    "Scale",
    "ScaleConfig",
    "ScheduleConfig",
    "SearchOptions",
    "Source",
    "Sweep",
    "SweepOptions",
    "TaskConfig",
    "TensorBoardConfig",
    "TrackerConfig",
    "TrainConfig",
    "Transform",
    "TrialState",
    "Trunk",
    "Tuning",
    "UsageError",
    "Watch",
    "decay_groups",
    "digits",
    "encode_png",
    "load_model",
    "load_plugins",
    "normalize",
    "override",
    "run_sweep",
    "train",
    "tune",
]

_NAMES = {  # module -> what it defines
    "codec": ("override",),
    "config": (
        "CheckpointConfig",
        "DataConfig",
        "EMAConfig",
        "FewShotConfig",
        "RunConfig",
        "ScaleConfig",
        "TrainConfig",
    ),
    "costs": ("Cost",),
    "data.batch": ("Batch", "normalize"),
    "data.images": ("Transform", "encode_png"),
    "data.packing": ("digits",),
    "data.samples": ("Sample", "Source"),
    "errors": ("UsageError",),
    "evaluation.models": ("load_model",),
    "frontier.frontier": ("Frontier",),
    "frontier.points": ("Point",),
    "optimizers": ("AdafactorConfig", "AdamWConfig", "LambConfig", "OptimizerConfig", "SGDConfig"),
    "optimizers.base": ("decay_groups",),
    "plugins": ("load_plugins",),
    "schedules": (
        "ConstantConfig",
        "CosineConfig",
        "DeitConfig",
        "LinearConfig",
        "RsqrtConfig",
        "ScheduleConfig",
    ),
    "sweeps.budget": ("Budget",),
    "sweeps.driver": ("SweepOptions", "run_sweep", "train"),
    "sweeps.queue": ("Job", "Policy", "TrialState"),
    "sweeps.run": ("Watch",),
    "sweeps.scales": ("Scale",),
    "sweeps.scheduler": ("FrontierScheduler",),
    "sweeps.search": ("OptunaSearch", "SearchOptions"),
    "sweeps.stopping": ("EarlyStopping",),
    "sweeps.sweep": ("Sweep", "Trunk"),
    "sweeps.tuning": ("Tuning", "tune"),
    "tasks": ("ClassificationConfig", "TaskConfig"),
    "tasks.base": ("Heads",),
    "tracking.base": ("Follower", "TrackerConfig"),
    "tracking.projection": ("Projection",),
    "tracking.tensorboard": ("TensorBoardConfig",),
    "training.run_directory": ("Result",),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}

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

"""Runs, metrics, artifacts and models in MLflow. The only package that knows it; it knows no Ray.

Always `MlflowClient` with explicit ids: the fluent API's active run is per thread and makes stray runs. What
is written waits on disk until the server has it (`outbox.py`): training never waits for MLflow.
"""

from orchestrator.tracking.find import Found, children, close_orphans, find_runs, find_sweep
from orchestrator.tracking.models import MODEL, checkpoint_of, log_checkpoint, register
from orchestrator.tracking.runs import TrackedRun, track, track_training, writer
from orchestrator.tracking.store import EXPERIMENT, Tracking, open_reader, open_tracking
from orchestrator.tracking.system import SystemMetrics

__all__ = [
    "EXPERIMENT",
    "MODEL",
    "Found",
    "SystemMetrics",
    "TrackedRun",
    "Tracking",
    "checkpoint_of",
    "children",
    "close_orphans",
    "find_runs",
    "find_sweep",
    "log_checkpoint",
    "open_reader",
    "open_tracking",
    "register",
    "track",
    "track_training",
    "writer",
]

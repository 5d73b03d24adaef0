"""Models of a sweep by name: those of the frontier get an alias in MLflow, and any is loaded by it."""

from moe.vit import ViT
from orchestrator.checkpoint.weights import load_newest
from orchestrator.frontier.frontier import Frontier
from orchestrator.frontier.points import is_complete
from orchestrator.sweeps.log import newest_checkpoint
from orchestrator.tracking import Tracking, checkpoint_of, register
from orchestrator.tracking.find import found_run

FAST, KNEE, BEST = "pareto-fast", "pareto-knee", "pareto-best"


def register_frontier(tracking: Tracking, frontier: Frontier) -> dict[str, str]:
    """alias -> version: the cheapest point of the front, the one with the highest quality, and the knee; of
    the knee the confirmed run, if there is one.
    """
    front = frontier.front
    if not front:
        return {}
    confirmed = [p for p in frontier.retrained if is_complete(p)]
    knee = confirmed[0] if confirmed else frontier.knee
    versions: dict[str, str] = {}
    for alias, point in {FAST: front[0], KNEE: knee, BEST: front[-1]}.items():
        if kept := newest_checkpoint(found_run(tracking, point.run_id).config()):
            versions[alias] = register(tracking, point.run_id, kept, alias)
    return versions


def load_model(uri: str, tracking_uri: str | None = None) -> ViT:
    """The torch module behind ``models:/<name>@<alias>`` or ``models:/<name>/<version>``, its weights read
    from the checkpoint in the run's storage.

    Without `tracking_uri`, MLflow's own holds (MLFLOW_TRACKING_URI). Raises UsageError if there is none.
    """
    checkpoint, run = checkpoint_of(uri, tracking_uri)
    model = ViT(run.model)
    load_newest(checkpoint, model)
    return model.eval()

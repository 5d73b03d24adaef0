"""Models of a sweep by name: models of the frontier get an alias in MLflow."""

from orchestrator.frontier.points import Frontier, front_points, is_complete, knee_point
from orchestrator.sweeps.log import newest_checkpoint
from orchestrator.tracking import Tracking, register
from orchestrator.tracking.find import found_run

FAST, KNEE, BEST = "pareto-fast", "pareto-knee", "pareto-best"


def register_frontier(tracking: Tracking, frontier: Frontier) -> dict[str, str]:
    """alias -> version: the cheapest point of the front, the one with the highest quality, and the knee; of
    the knee the confirmed run, if there is one.
    """
    front = front_points(frontier)
    if not front:
        return {}
    confirmed = [p for p in frontier.rest if is_complete(p)]
    knee = confirmed[0] if confirmed else knee_point(frontier.points)
    versions: dict[str, str] = {}
    for alias, point in {FAST: front[0], KNEE: knee, BEST: front[-1]}.items():
        if kept := newest_checkpoint(found_run(tracking, point.run_id).config()):
            versions[alias] = register(tracking, point.run_id, kept, alias)
    return versions

"""From MLflow to a frontier, and back: its page, picture and tags. Needs nothing but the tracking store."""

import tempfile
from pathlib import Path

from moe.cost import slots_per_token
from orchestrator import storage
from orchestrator.config import RunConfig, UsageError
from orchestrator.frontier.page import frontier_page
from orchestrator.frontier.picture import frontier_picture
from orchestrator.frontier.points import Frontier, Point, Status, front_points, hypervolume
from orchestrator.tracking import Found, Tracking, children, find_sweep
from orchestrator.training.worker import costs

MEASURED = (  # metric, label in the hover and the table
    ("val/loss", "validation loss"),
    ("perf/ms_per_image", "ms per image"),
    ("perf/images_per_s", "training images/s"),
    ("cost/device_s", "device seconds"),
    ("cost/forward_gflops_2mac", "forward GFLOPs"),
    ("cost/params", "parameters"),
    ("moe/dropped_frac", "dropped tokens"),
)


def build_frontier(sweep: Found, runs: list[Found]) -> Frontier:
    """The frontier of a sweep's children. The reference point is chance, at 1.1 times the highest cost."""
    quality, cost = sweep.tags["objective.quality"], sweep.tags["objective.cost"]
    configs = {run.tracked.run_id: run.config() for run in runs}
    points = [_point(run, configs[run.tracked.run_id], quality, cost) for run in runs]
    trials = tuple(p for p, run in zip(points, runs, strict=True) if run.tags["role"] == "trial")
    confirmed = tuple(p for p, run in zip(points, runs, strict=True) if run.tags["role"] == "confirm")
    chance = 1 / min(config.model.num_classes for config in configs.values())
    return Frontier(
        name=sweep.name,
        cost_name=cost,
        quality_name=quality,
        points=trials,
        rest=confirmed,
        reference=(1.1 * max(p.cost for p in trials), chance),
    )


def publish(tracking: Tracking, name: str, folder: str) -> Frontier:
    """Writes page and picture into `folder` and, with tags and hypervolume, to the sweep's MLflow run."""
    sweep = find_sweep(tracking, name)
    runs = children(tracking, sweep.tracked)
    if not runs:
        raise UsageError(f"sweep {name!r} has no trials yet")
    frontier = build_frontier(sweep, runs)
    members = {point.run_id for point in front_points(frontier)}
    for run in runs:
        marked = run.tags.get("pareto") == "true"
        if (run.tracked.run_id in members) != marked:
            run.tracked.tag(pareto="false" if marked else "true")
    with tempfile.TemporaryDirectory() as temporary:
        page, picture = Path(temporary, "frontier.html"), Path(temporary, "frontier.png")
        page.write_text(frontier_page(frontier), encoding="utf-8")
        frontier_picture(frontier, picture)
        for file in (page, picture):
            sweep.tracked.write_file(file)
            storage.write_bytes(storage.join(folder, file.name), file.read_bytes())
    sweep.tracked.tag(
        **{
            "hypervolume": f"{hypervolume(frontier):.6f}",
            "hypervolume.reference": f"{frontier.cost_name}={frontier.reference[0]:g},"
            f" {frontier.quality_name}={frontier.reference[1]:g}",
        }
    )
    return frontier


def _point(run: Found, config: RunConfig, quality: str, cost: str) -> Point:
    moe = config.model.moe
    known = costs(config, config.train.steps)  # a failed run's place on the cost axis is known all the same
    details: dict[str, str | float] = {}
    if moe:
        details |= {"experts": moe.num_experts, "slots per expert": config.model.slots()}
    details |= {label: run.metrics[name] for name, label in MEASURED if name in run.metrics}
    return Point(
        arm=run.tags["arm"],
        family=_family(config),
        cost=run.metrics.get(cost, known.get(cost, float("nan"))),
        quality=run.metrics.get(quality, float("nan")),
        size=slots_per_token(config.model),
        run_id=run.tracked.run_id,
        run_url=run.url,
        status=_status(run),
        details=details,
    )


def _family(config: RunConfig) -> str:
    """The kind of router, after the plan it goes by if that is not the softmax (Routers, figure 1)."""
    if not config.model.moe:
        return "dense"
    router = config.model.moe.router
    plan = getattr(router, "affinity", None)
    return router.kind if plan is None or plan.kind == "softmax" else f"{plan.kind}_{router.kind}"


def _status(run: Found) -> Status:
    if run.tags.get("diverged") == "true":
        return "diverged"
    return {"FINISHED": "finished", "RUNNING": "running"}.get(run.status, "failed")  # pyright: ignore

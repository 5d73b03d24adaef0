"""The process that frees a training's devices when its controller has died. It loads no torch."""

from typing import Any

from ray._private.state import actors
from ray.train.v2._internal.execution.controller import placement_group_cleaner
from ray.train.v2._internal.execution.controller.placement_group_cleaner import PlacementGroupCleaner


class Cleaner(PlacementGroupCleaner):
    """Frees the workers' resources when the controller has died, as its own cluster knows it.

    Ray 2.60 asks a dashboard. A cluster without one names the port 8265 all the same, where another cluster
    may answer, and takes a controller that this one does not know for dead: it would end a live training.
    """

    def start_monitoring(self) -> Any:
        module: Any = placement_group_cleaner
        module.is_actor_alive = _is_alive
        return super().start_monitoring()


def _is_alive(actor_id: str, timeout: float) -> bool:
    return actors(actor_id).get("State") != "DEAD"

"""A run on fewer workers than it asks for: the sizes that it can have, and the wait for those it misses."""

import threading
from collections.abc import Callable
from math import gcd

from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.training.cluster import CPU_FOR_DATA, placement, worker_resources

PROBE_S = 2  # the cluster answers at once what it has


def at_size(run: RunConfig, workers: int) -> RunConfig | None:
    """The same run on `workers`, with the same global batch: each accumulates more passes, none of which is
    larger than before. None where the batch, its lanes or the model do not divide.

    Workers that share a set of experts, and copies of the model, become the largest divisors that fit.
    """
    share, group = run.data.batch_size // workers, run.model.moe.images_per_group if run.model.moe else 1
    images = [n for n in range(group, run.images_per_pass() + 1, group) if share % n == 0]
    ep = gcd(run.ep(), workers)
    copies = gcd(run.scale.dp_replicate, workers // ep)
    changes = {
        "scale.workers": workers,
        "scale.min_workers": min(workers, run.scale.min_workers),
        "scale.ep": ep,
        "scale.dp_replicate": copies,
        "train.microbatch": max(images, default=share),
    }
    try:
        return override(run, changes)
    except ValueError:
        return None


def are_there(run: RunConfig, *, within_s: float) -> bool:
    """Whether the cluster has what the run's workers hold, and the CPU that decodes for them: without it they
    would wait for ever. Asking makes an autoscaler bring it up.
    """
    group = _reserve(run, run.scale.workers)
    found = group.wait(within_s)
    remove_placement_group(group)
    return found


def smaller(run: RunConfig) -> RunConfig | None:
    """The run on the most workers below its own that are there, and that `scale.min_workers` allows."""
    sizes = (at_size(run, workers) for workers in range(run.scale.workers - 1, run.scale.min_workers - 1, -1))
    return next((one for one in sizes if one and are_there(one, within_s=PROBE_S)), None)


class Missing:
    """The workers that a run would have more. Asking for them is a reason for an autoscaler to bring them up;
    what comes is let go at once, for the run still decodes on it.
    """

    def __init__(self) -> None:
        self._ask: Callable[[], PlacementGroup] | None = None
        self._group: PlacementGroup | None = None
        self._came = False

    def want(self, run: RunConfig, workers: int) -> None:
        self._ask = (lambda: _reserve(run, workers)) if workers else None
        self._group, self._came = None, False

    def are_there(self) -> bool:
        """To be called while the others train: what is theirs would be taken for more before they hold it."""
        if self._ask and self._group is None:
            self._group = self._ask()
            threading.Thread(target=self._watch, args=(self._group,), daemon=True).start()
        return self._came

    def _watch(self, group: PlacementGroup) -> None:
        while self._group is group and not group.wait(1):
            pass
        self._came = self._group is group
        remove_placement_group(group)


def _reserve(run: RunConfig, workers: int) -> PlacementGroup:
    bundles = [worker_resources(run)] * workers + [{"CPU": CPU_FOR_DATA}]
    return placement_group(bundles, strategy=placement(run))

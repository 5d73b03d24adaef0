"""Frontiers for the tests, small and large."""

import math
import random
from typing import Any

from orchestrator.frontier.frontier import Frontier
from orchestrator.frontier.points import Point, Status

NAN = math.nan
LINK = "http://mlflow.test:5000/#/experiments/1/runs/"
EVIL = "<img src=x onerror=alert(1)>\"'&</script><script>alert(2)</script><!--$x^{$"
FLOPS, SECONDS, ACC = "cost/train_flops_6mac", "cost/device_s", "val/acc1"


def point(
    arm: str, family: str, cost: float, quality: float, status: Status = "finished", **more: Any
) -> Point:
    known: dict[str, Any] = {
        "size": 2 if arm.endswith("2") else 1,
        "run_id": f"{arm}-0123456789abcdef",
        "run_url": f"{LINK}{arm}",
        "details": {"k": 2.0, "affinity": "softmax"},
        "costs": {SECONDS: 1e12 / cost} if cost > 0 else {},
        "settings": {"family": family, "capacity": 2.0},
    }
    return Point(arm=arm, family=family, cost=cost, quality=quality, status=status, **(known | more))


FRONTIER = Frontier(
    name="routers",
    cost_name=FLOPS,
    quality_name=ACC,
    points=(
        point("dense-s", "dense", 2e10, 0.80),
        point("dense-l", "dense", 3e11, 0.88),
        point("soft-1", "soft", 3e10, 0.90),
        point("soft-2", "soft", 9e10, 0.93),
        point("tc-1", "token_choice", 4e10, 0.85),
        point("ec-2", "expert_choice", 8e11, 0.95),
        point("hash-1", "hash", 5e10, 0.70),
        point("tc-burnt", "token_choice", 6e10, NAN, "diverged"),
        point("ec-young", "expert_choice", 1e9, 0.4, "running"),
        point("ec-early", "expert_choice", 2e9, 0.99, "stopped"),
        point("soft-oom", "soft", NAN, NAN, "failed"),
    ),
    retrained=(point("soft-2-long", "soft", 9e11, 0.97),),
    reference={FLOPS: 1e12, ACC: 0.1},
)


def many(count: int) -> Frontier:
    """A large sweep: two costs, most trials complete, each with what it spent."""
    draw = random.Random(0)
    points = []
    for i in range(count):
        family, cost = (
            draw.choice(["dense", "soft", "token_choice", "expert_choice"]),
            10 ** draw.uniform(9, 13),
        )
        status = draw.choice(("finished",) * 12 + ("stopped", "diverged", "failed"))
        quality = 0.1 * math.log10(cost) - 0.4 + draw.gauss(0, 0.02) if status == "finished" else NAN
        costs = {SECONDS: cost / 1e9 * draw.uniform(1, 2)}
        points.append(point(f"{family}-{i}", family, cost, quality, status, costs=costs))
    return Frontier(
        name="many",
        cost_name=FLOPS,
        quality_name=ACC,
        points=tuple(points),
        reference={FLOPS: 1e14, ACC: 0.1, SECONDS: 1e5},
        spending=tuple((p.run_id, p.cost / 1e9) for p in points),
    )

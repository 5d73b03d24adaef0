"""Frontiers for the tests of the page, small and large."""

import math
import random

from orchestrator.frontier.points import Frontier, Point, Status

NAN = float("nan")
LINK = "http://mlflow.test:5000/#/experiments/1/runs/"
EVIL = "<img src=x onerror=alert(1)>\"'&</script><script>alert(2)</script><!--"


def point(arm: str, family: str, cost: float, quality: float, status: Status = "finished") -> Point:
    return Point(
        arm=arm,
        family=family,
        cost=cost,
        quality=quality,
        size=2 if arm.endswith("2") else 1,
        run_id=f"{arm}-0123456789abcdef",
        run_url=f"{LINK}{arm}",
        status=status,
        details={"k": 2.0, "affinity": "softmax"},
        costs={"cost/device_s": 1e12 / cost},
        settings={"family": family, "capacity": 2.0},
    )


FRONTIER = Frontier(
    name="routers",
    cost_name="cost/train_flops_6mac",
    quality_name="val/acc1",
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
    rest=(point("soft-2-long", "soft", 9e11, 0.97),),
    reference=(1e12, 0.1),
)

FAMILIES = ("dense", "soft", "token_choice", "expert_choice", "sinkhorn_expert_choice")


def many(count: int) -> Frontier:
    """As many trials, two costs, four of five complete, each with an end: what a large sweep leaves."""
    draw = random.Random(0)
    points = []
    for i in range(count):
        family, cost = draw.choice(FAMILIES), 10 ** draw.uniform(9, 13)
        status = draw.choice(("finished",) * 12 + ("stopped", "diverged", "failed"))
        trial = Point(
            arm=f"{family}-{i}",
            family=family,
            cost=cost,
            quality=0.1 * math.log10(cost) - 0.4 + draw.gauss(0, 0.02) if status == "finished" else NAN,
            size=draw.choice((0.5, 1, 2)),
            run_id=f"{draw.getrandbits(128):032x}",
            run_url=f"{LINK}{i}",
            status=status,
            details={"experts": 8.0, "validation loss": draw.random()},
            costs={"cost/device_s": cost / 1e9 * draw.uniform(1, 2)},
            settings={"capacity": 1.0, "depth": 4.0},
            spent=cost / 1e9,
            ended=float(i),
        )
        points.append(trial)
    return Frontier(
        name="many",
        cost_name="cost/train_flops_6mac",
        quality_name="val/acc1",
        points=tuple(points),
        reference=(1e14, 0.1),
        panels=("cost/device_s",),
    )

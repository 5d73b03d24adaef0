"""Branches: runs that go on from a kept checkpoint of another, the trunk, and cool down.

Source: Soft MoE, section 3.4: a long run at a slowly falling rate is cooled down from several of its steps,
so that one training pays for a whole cost axis.
"""

from collections.abc import Mapping
from typing import Any

from orchestrator.codec import MAY_CHANGE, flat, from_dict
from orchestrator.config import RunConfig
from orchestrator.errors import UsageError
from orchestrator.training.optim import learning_rate

_OWN = ("name", "train.trunk", "train.steps", "train.schedule.", "train.report_every", "train.eval_every")


def check_trunk(config: Mapping[str, Any], step: int, run: RunConfig) -> None:
    """That `run` would have come to the same weights at `step` by itself.

    Args:
        config: of the trunk, as its checkpoint has it.

    Raises:
        UsageError: naming the fields that differ, or the first step at which the learning rates do.
    """
    trunk = from_dict(RunConfig, config)
    if step >= run.train.steps:
        raise UsageError(f"{run.name}: train.steps={run.train.steps} end before its trunk, at step {step}")
    old, new = flat(trunk), flat(run)
    names = [n for n in {**old, **new} if not n.startswith((*MAY_CHANGE, *_OWN))]
    if changed := [f"{n}: {old.get(n)!r} -> {new.get(n)!r}" for n in names if old.get(n) != new.get(n)]:
        raise UsageError(f"{run.name} cannot branch from {trunk.name}: {'; '.join(changed)}")
    for at in range(step):
        rates = [
            learning_rate(one.train.schedule, at, peak=one.train.lr, total=one.train.steps)
            for one in (trunk, run)
        ]
        if rates[0] != rates[1]:
            raise UsageError(
                f"{run.name} cannot branch from {trunk.name} at step {step}: at step {at} its learning rate"
                f" would be {rates[1]:g}, the trunk's was {rates[0]:g}; give both the same"
                " train.schedule.warmup_steps, and cool down after the branch"
            )

"""A sweep of four small arms, for ``--sweep tests/jobs/small_sweep.py:make``."""

from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.sweeps.sweep import Sweep

ARMS = 4


def make() -> Sweep:
    kinds = ("soft", "expert_choice", "token_choice")
    arms: dict[str, dict[str, object]] = {"dense": {}}
    for i in range(1, ARMS):
        arms[f"arm{i}"] = {
            "model.moe.router.kind": kinds[i % 3],
            "model.moe.num_experts": 2,
            "model.mlp_dim": 32 + 16 * i,
        }
    fields = {"name": "small", "train.steps": 60, "train.report_every": 5, "checkpoint.every": 10}
    return Sweep(base=override(RunConfig(), fields), arms=arms)

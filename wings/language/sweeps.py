"""The sweep of language models."""

from orchestrator.sweeps.arms import Arm, moe, named, seeds, token_choice
from orchestrator.sweeps.scales import TINY, Scale, vit_size
from orchestrator.sweeps.sweep import Sweep

TINY.add(
    "language",
    base={  # 3.3 epochs of the text of Python's help
        "model.kind": "decoder",
        **vit_size(32, 2, 2),
        "task.kind": "next_token",
        "data.batch_size": 16,
        "train.steps": 600,
        "train.lr": 5e-3,
        "train.report_every": 50,
        "scale.reshard_after_forward": False,
    },
    sizes={"w16": vit_size(16, 2, 2), "w32": vit_size(32, 2, 2), "w48": vit_size(48, 2, 3)},
    data="python-topics",
)


@named(task="next_token")
def language(scale: Scale) -> Sweep:
    """A decoder over bytes, dense, with token choice, and with every expert for every token; three seeds.

    Source: the calmops article on Soft MoE, whose language model has Soft MoE; it
    prints no results.

    Design: routers that let a token see later ones are refused, Soft MoE among them (docs/texts.md). Token
    choice with one expert seats tokens in their order, so its capacity may be small; the experts of the
    mixture are a fraction of those of token choice, because each costs an MLP.
    """
    experts = scale.experts
    kinds: dict[str, Arm] = {
        "dense": {},
        "token": token_choice(experts, 1, 1.25, images=1, layers="last_1"),
        "mixture": moe("mixture", max(2, experts // 2), layers="last_1"),
    }
    arms = {
        f"{name}-{kind}": {**size, **arm} for name, size in scale.sizes.items() for kind, arm in kinds.items()
    }
    claims = ("family=token_choice beats family=dense at equal size",)
    return Sweep(base=scale.base, arms=arms, seeds=seeds(scale, 3), claims=claims)

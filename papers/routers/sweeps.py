"""The sweeps of Routers in Vision MoE (Liu et al. 2024, https://arxiv.org/abs/2401.15969)."""

from orchestrator.codec import override
from orchestrator.sweeps.arms import MOE, Arm, expert_choice, moe, named, soft, token_choice
from orchestrator.sweeps.scales import Scale
from orchestrator.sweeps.sweep import Sweep


@named()
def routers(scale: Scale) -> Sweep:
    """Six routers x capacity x architecture: which router is best at equal cost?

    Source: Routers in Vision MoE (Liu et al.), section 3.1, figures 1 and 2: softmax and Sinkhorn token
    choice with k of 1 and 2; softmax, Sinkhorn and sparsity-constrained expert choice, and Soft MoE, with c
    of 1 and 2; 32 experts in every second block of B/32, B/16 and L/16. Ours: the dense model of each size,
    and groups of 8 images. Two of the 36 have no figures in the paper, for they did not train stably.
    """
    arms: dict[str, Arm] = {}
    for name, changes in scale.sizes.items():
        tokens = override(scale.base, changes).model.tokens()
        arms[f"{name}-dense"] = dict(changes)
        for router, arm in six_routers(scale.experts, tokens).items():
            arms[f"{name}-{router}"] = {**changes, **arm}
    claims = (
        # Section 3.2: expert choice generally surpasses token choice; tables 1 to 8: in 24 of 24 pairs.
        "router=expert_choice beats router=token_choice at equal size, capacity, affinity",
        # Section 3.2: Soft MoE outperforms both by a noticeable margin.
        "family=soft beats best family!=soft|dense at equal size, capacity",
        # Section 3.2: of token choice the Sinkhorn affinity is the better; tables 1 to 8: in 9 of 12 pairs.
        "family=sinkhorn_token_choice beats family=token_choice at equal size, k",
    )
    return Sweep(base=scale.base, arms=arms, claims=claims)


def six_routers(experts: int, tokens: int) -> dict[str, Arm]:
    """The twelve arms of one architecture."""
    found: dict[str, Arm] = {}
    for k in (1, 2):
        found[f"softmax-tc-k{k}"] = token_choice(experts, k)
        found[f"sinkhorn-tc-k{k}"] = sinkhorn(token_choice(experts, k))
    for c in (1, 2):
        found[f"softmax-ec-c{c}"] = expert_choice(experts, c)
        found[f"sinkhorn-ec-c{c}"] = sinkhorn(expert_choice(experts, c))
        found[f"sparse-ec-c{c}"] = expert_choice(experts, c, affinity_kind="sparse_transport")
        found[f"soft-c{c}"] = soft(experts, c, tokens)
    return found


@named()
def softmax_combine(scale: Scale) -> Sweep:
    """Weigh the experts' outputs by the softmax, or by the transport plan that sent the tokens?

    Source: Routers in Vision MoE, section 3.4 and figure 3: Sinkhorn token choice with k of 1 and 2 in B/32,
    its combine tensor from the softmax or from the plan; expert choice beside it is ours.
    """
    arms: dict[str, Arm] = {}
    for combine in ("softmax", "affinity"):
        for k in (1, 2):
            arms[f"token-k{k}-{combine}"] = sinkhorn(token_choice(scale.experts, k, combine=combine))
        for c in (1, 2):
            arms[f"expert-c{c}-{combine}"] = sinkhorn(expert_choice(scale.experts, c, combine=combine))
    # Section 3.4: the combine tensor from the softmax "also enhances performance", in figure 3 that of token
    # choice by about 1 %.
    claims = ("combine=softmax beats combine=affinity at equal family, capacity",)
    return Sweep(base=scale.base, arms=arms, claims=claims)


@named()
def fixed_routing(scale: Scale) -> Sweep:
    """Routers that learn beside rules that do not: what does learning to route bring?

    Source: Routers in Vision MoE cites Roller et al. 2021, "Hash Layers For Large Sparse Models"; patches
    have no ids, so the rules go by their place and by the signs of random projections. One expert per
    token in every second block; what is dropped is up to the capacity of 2 of each router.
    """
    arms: dict[str, Arm] = {"dense": {}, "token": token_choice(scale.experts, 1, 2.0, images=1)}
    arms["soft"] = soft(scale.experts, 1, scale.base.model.tokens())
    for by in ("place", "content"):
        arms[f"hash-{by}"] = moe("hash", scale.experts, by=by)
    claims = ("family=token_choice beats family=hash", "family=soft beats family=hash")
    return Sweep(base=scale.base, arms=arms, claims=claims)


def sinkhorn(arm: Arm) -> Arm:
    """The arm with its tokens sent by the entropic plan. Clark et al. train it without auxiliary losses."""
    changed = arm | {f"{MOE}.router.affinity.kind": "sinkhorn"}
    if arm[f"{MOE}.router.kind"] == "token_choice":
        off = ("noise_std", "importance_weight", "load_weight")
        changed |= {f"{MOE}.router.{name}": 0.0 for name in off}
    return changed

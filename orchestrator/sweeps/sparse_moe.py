"""The sweeps of V-MoE (Riquelme et al. 2021, https://arxiv.org/abs/2106.05974), Routers in Vision MoE (Liu et
al. 2024, https://arxiv.org/abs/2401.15969), Implicit Bias in Soft MoE (Chung et al. 2024) and the calmops
article.

At scales without the sizes of the papers they are the nearest that the scale's sizes allow.
"""

from orchestrator.codec import override
from orchestrator.sweeps.arms import (
    MOE,
    Arm,
    expert_choice,
    last_half,
    moe,
    named,
    sinkhorn,
    soft,
    token_choice,
)
from orchestrator.sweeps.scales import Scale, vit_of
from orchestrator.sweeps.sweep import Sweep


@named
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


@named
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


@named
def expert_count(scale: Scale) -> Sweep:
    """Many small experts or few large ones: the same parameters in all, one slot per expert.

    Source: Implicit Bias in Soft MoE, section 4 and appendix D: n experts in the last half of ViT-B/16 whose
    hidden layers add up to the same number, that of 16 dense MLPs (513M parameters). The numbers n of that
    model are not readable; those here are ours, and hold the 2, 8, 16, 64, 128 printed for CIFAR100. The
    paper's model of one huge expert has two here, since a layer needs at least two.
    """
    model = vit_of(scale.base)
    total = model.mlp_dim * scale.experts // 2  # hidden units of all experts of a layer
    counts = [2**i for i in range(1, 8) if 2**i <= 4 * scale.experts and total % 2**i == 0]
    layers = last_half(model.depth)
    arms = {
        f"n{n}": moe("soft", n, layers=layers, slots_per_expert=1) | {f"{MOE}.expert_dim": total // n}
        for n in counts
    }
    return Sweep(base=scale.base, arms=arms)


@named
def capacity(scale: Scale) -> Sweep:
    """Capacity in training, with and without batch prioritized routing: how far can it fall?

    Source: V-MoE, sections 2.4 and 4, table 2 and figure 4: top-k routing in every second block, buffers of
    C = k * tokens * capacity / experts, filled in the order of the tokens or of their priority. Only 1.05 is
    printed for training; figures 5 and 6 (C of 0.6, 0.7 and 0.8, k of 1 and 2) lower it in trained models, as
    `jobs/operating_points.py` does.
    """
    arms: dict[str, Arm] = {"dense": {}}
    for k in (1, 2):
        for factor in (0.25, 0.5, 1.05, 1.5):
            arms[f"k{k}-c{factor}"] = token_choice(scale.experts, k, factor)
            arms[f"k{k}-c{factor}-bpr"] = token_choice(scale.experts, k, factor, priority="max")
    claims = (
        # Section 4.2 and figure 6, which are of k=2: "Even for large Cs BPR outperforms vanilla; at low C the
        # difference is stark."
        "priority=max beats priority=none at equal k, capacity",
        "priority=max loses less than priority=none at equal k as capacity falls",
    )
    return Sweep(base=scale.base, arms=arms, claims=claims)


@named
def vmoe(scale: Scale) -> Sweep:
    """V-MoE beside ViT: experts in every second block, or in the last few odd blocks.

    Source: V-MoE, section 3.1, table 2 and figure 2: 32 experts, k of 2, a capacity of 1.05; the last five
    odd blocks of H, the last two of smaller models. Here every size has all three; the paper has 15B every-2
    alone, trains L/16 for 7 epochs too, and prints neither the batch nor other epochs. On ImageNet-1k and
    ImageNet-21k the arm that was released is beside them.
    """
    arms: dict[str, Arm] = {}
    for name, changes in scale.sizes.items():
        depth = vit_of(override(scale.base, changes)).depth
        last = 5 if depth >= 32 else min(2, depth // 4)
        arms[f"{name}-dense"] = dict(changes)
        for layers in ("every_2", *([f"last_{last}_odd"] if last else [])):
            router = token_choice(scale.experts, 2, 1.05, layers=layers)
            arms[f"{name}-{layers.replace('_', '').removesuffix('odd')}"] = {**changes, **router}
    arms |= {name: dict(arm) for name, arm in scale.released.get("vmoe", {}).items()}
    # Figure 2, and table 2 for H/14.
    return Sweep(base=scale.base, arms=arms, claims=("family=token_choice beats family=dense at equal size",))


@named
def topk(scale: Scale) -> Sweep:
    """K experts per token, and the softmax before or after they are chosen: which K, which order?

    Source: V-MoE, section 2.3 and appendices A and B (figure 10): K of 1 to 8, here those that the experts
    allow, in every second block with a capacity of 1.05. With one expert per token a softmax over it alone is
    1, and would train no router.
    """
    arms: dict[str, Arm] = {"dense": {}}
    for k in (1, 2, 4, 8):
        if k <= scale.experts:
            arms[f"k{k}-after"] = token_choice(scale.experts, k, 1.05)
            if k > 1:
                arms[f"k{k}-before"] = token_choice(scale.experts, k, 1.05, topk="before")
    # Section 2.3: the choice after the softmax "also performs better for k > 1".
    return Sweep(base=scale.base, arms=arms, claims=("topk=after beats topk=before at equal k",))


@named
def mixtures(scale: Scale) -> Sweep:
    """Every expert for every token, weighed by the router: what each part of the mixture brings.

    Source: the calmops article "SoftMoE: Beyond Hard Expert Selection": 16 experts (here those of the scale),
    temperature 1.0 that decays by 0.99 at each step, and its variants; it prints no results. Every arm costs
    as many MLPs as it has experts.
    """
    variants: dict[str, Arm] = {
        "token": {},
        "image": {"level": "image"},
        "hierarchical": {"level": "hierarchical"},
        "mlp-gate": {"gate": "mlp"},
        "scaled-inputs": {"scale_inputs": True},
    }
    half = last_half(vit_of(scale.base).depth)
    arms: dict[str, Arm] = {"dense": {}}
    for name, fields in variants.items():
        arms[name] = moe("mixture", scale.experts, layers=half, temperature_decay=0.99, **fields)
    arms["constant-temperature"] = moe("mixture", scale.experts, layers=half)
    arms["learned-temperature"] = moe("mixture", scale.experts, layers=half, learn_temperature=True)
    return Sweep(base=scale.base, arms=arms)

"""The sweeps of V-MoE (Riquelme et al. 2021, https://arxiv.org/abs/2106.05974)."""

from orchestrator.codec import override
from orchestrator.sweeps.arms import Arm, named, token_choice
from orchestrator.sweeps.scales import Scale
from orchestrator.sweeps.sweep import Sweep
from papers.scales import vit_of


@named()
def capacity(scale: Scale) -> Sweep:
    """Capacity in training, with and without batch prioritized routing: how far can it fall?

    Source: V-MoE, sections 2.4 and 4, table 2 and figure 4: top-k routing in every second block, buffers of
    C = k * tokens * capacity / experts, filled in the order of the tokens or of their priority. Only 1.05 is
    printed for training; figures 5 and 6 (C of 0.6, 0.7 and 0.8, k of 1 and 2) lower it in trained models, as
    `jobs/evaluate.py --grid` does.
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


@named()
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


@named()
def topk(scale: Scale) -> Sweep:
    """K experts per token of how many, and the softmax before or after they are chosen?

    Source: V-MoE, section 2.3 and appendices A and B (figure 10): K of 1 to 8, here those that the experts
    allow, in every second block with a capacity of 1.05; K of 2 among more and fewer experts, whose numbers
    are ours. With one expert per token a softmax over it alone is 1, and would train no router.
    """
    arms: dict[str, Arm] = {"dense": {}}
    for k in (1, 2, 4, 8):
        if k <= scale.experts:
            arms[f"k{k}-after"] = token_choice(scale.experts, k, 1.05)
            if k > 1:
                arms[f"k{k}-before"] = token_choice(scale.experts, k, 1.05, topk="before")
    for experts in (scale.experts // 4, scale.experts // 2, 2 * scale.experts):
        arms[f"k2-e{experts}"] = token_choice(experts, 2, 1.05)
    # Section 2.3: the choice after the softmax "also performs better for k > 1".
    return Sweep(base=scale.base, arms=arms, claims=("topk=after beats topk=before at equal k, experts",))


# Slots per token. The MLPs of ViT-L/16 are 65 % of its FLOPs: with 0.38 in every second block a fifth is
# saved.
_SLOTS = (0.38, 0.5, 0.6, 0.8, 1.0)


@named()
def priority(scale: Scale) -> Sweep:
    """Fewer slots than tokens, with and without priority: is the dense model reached for less than its cost?

    Source: V-MoE, section 4.1 and appendix C: with batch prioritized routing at a low capacity a model is as
    good as the dense one with about 20 % fewer training FLOPs. K of 1 and 2 in every second block; an
    expert has room for 0.38 to 1 slots per token, K and C together.
    """
    arms: dict[str, Arm] = {"dense": {}}
    for slots in _SLOTS:
        for k in (1, 2):
            arms[f"k{k}-x{slots}"] = token_choice(scale.experts, k, slots / k)
            arms[f"k{k}-x{slots}-bpr"] = token_choice(scale.experts, k, slots / k, priority="max")
    least = "|".join(f"k{k}-x{_SLOTS[0]}-bpr" for k in (1, 2))
    claims = (
        # For fewer FLOPs by the number of slots.
        f"best arm={least} beats arm=dense",
        "priority=max beats priority=none at equal k, capacity",
        "priority=max loses less than priority=none at equal k as capacity falls",
    )
    return Sweep(base=scale.base, arms=arms, claims=claims)


@named()
def last_layers(scale: Scale) -> Sweep:
    """Experts in the last 1 to 6 odd blocks, in every second or every block: how many are worth their cost?

    Source: V-MoE, section 3.1 and appendix E.1, whose own numbers were not read: experts in the last few
    blocks alone have "little impact on quality"; K of 2, a capacity of 1.05. Every block is ours.
    """
    depth = vit_of(scale.base).depth
    counts = [n for n in range(1, 7) if n < depth // 2]
    arms: dict[str, Arm] = {"dense": {}, "every2": token_choice(scale.experts, 2, 1.05)}
    arms["every1"] = token_choice(scale.experts, 2, 1.05, layers=f"last_{depth}")
    for n in counts:
        arms[f"last{n}"] = token_choice(scale.experts, 2, 1.05, layers=f"last_{n}_odd")
    return Sweep(base=scale.base, arms=arms, claims=("arm=every2|last1 beats arm=dense",))

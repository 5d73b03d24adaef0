"""The sweeps of Soft MoE (Puigcerver et al. 2023, https://arxiv.org/abs/2308.00951)."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import ceil, log2

from orchestrator.codec import override
from orchestrator.errors import UsageError
from orchestrator.sweeps.arms import (
    GROUP,
    MOE,
    Arm,
    expert_choice,
    families_space,
    moe,
    named,
    seeds,
    soft,
    token_choice,
)
from orchestrator.sweeps.scales import Scale
from orchestrator.sweeps.sweep import Sweep
from papers.scales import last_half, vit_of


@dataclass(frozen=True)
class TableSize:
    """The models of one size in table 9, beside the dense model.

    Attributes:
        soft: experts, one slot each: the slots are not printed, and give all printed exaFLOPs but H/14's.
        expert: experts and c of Experts Choice, each with every number of images per group of `images`.
        token: experts, K and C of Tokens Choice, with groups of 8 images.
    """

    soft: tuple[int, ...]
    expert: tuple[tuple[int, float], ...]
    images: tuple[int, ...]
    token: tuple[tuple[int, int, float], ...]


_SIX = tuple((e, k, c) for e in (32, 64) for k, c in ((1, 1), (2, 1), (2, 2)))
_PATCH_32 = TableSize((32, 64), ((32, 0.5), (32, 1), (64, 1)), (1, GROUP), _SIX)
_EXPERT_16 = ((128, 0.5), (32, 1), (256, 1), (32, 2))
TABLE_9 = {
    "S32": _PATCH_32,
    "B32": _PATCH_32,
    "L32": _PATCH_32,
    "S16": TableSize((16, 32, 64, 128, 256), _EXPERT_16, (1, GROUP), _SIX),
    "B16": TableSize((128, 256, 512), _EXPERT_16, (1, GROUP), _SIX),
    "L16": TableSize((128, 256), _EXPERT_16, (1,), tuple(row for row in _SIX if row[1] == row[2])),
    "S8": TableSize((512,), ((32, 1), (512, 1)), (1, GROUP), _SIX[:3]),
    "H14": TableSize((128,), ((64, 1.25),), (GROUP,), ((64, 1, 1.25),)),
}


def _of_table_9(size: TableSize, tokens: int) -> Iterator[tuple[str, Arm, str]]:
    """Yields name, arm and the name in the table of published figures."""
    for e in size.soft:
        yield f"soft-{e}e", moe("soft", e, slots_per_expert=1), f"Soft MoE {e}E"
    for (e, c), images in product(size.expert, size.images):
        # Noise of 1/E: the released config of Experts Choice, soft_moe/common.py:228.
        arm, group = expert_choice(e, c, images=images, noise_std=1.0), images * tokens
        yield f"expert-{e}e-c{c}-g{images}", arm, f"Experts Choice {e}E c={c} group={group}"
    for e, k, c in size.token:
        arm, group = token_choice(e, k, c, priority="max"), GROUP * tokens
        yield f"token-{e}e-k{k}-c{c}", arm, f"Tokens Choice {e}E k={k} c={c} group={group}"


@named()
def pareto(scale: Scale) -> Sweep:
    """Families x sizes x capacities: the frontier of quality against the cost of training.

    Source: Soft MoE, section 3.3 (which says 106 models), figure 3 and table 9 (whose 107 are here): dense
    models, token choice with batch prioritized routing, expert choice in groups of 1 and 8 images, and Soft
    MoE, MoE in the last half of the blocks. Its one slot per expert is not printed, but fits the costs.
    """
    arms, published = dict[str, Arm](), dict[str, str]()
    for name, changes in scale.sizes.items():
        run = override(scale.base, changes)
        tokens = run.model.tokens()
        arms[f"{name}-dense"] = dict(changes)
        published[f"{name}-dense"] = f"{printed_size(name)} Dense"
        layers = {f"{MOE}.layers": last_half(run)}
        if size := TABLE_9.get(name):
            for family, arm, print_ in _of_table_9(size, tokens):
                arms[f"{name}-{family}"] = {**changes, **arm, **layers}
                published[f"{name}-{family}"] = f"{printed_size(name)} {print_}"
            continue
        families = (
            {f"token-k{k}": token_choice(scale.experts, k, priority="max") for k in (1, 2)}
            | {f"expert-c{c}": expert_choice(scale.experts, c) for c in (0.5, 1, 2)}
            | {f"soft-x{x}": soft(scale.experts, x, tokens) for x in (0.5, 1, 2)}
        )
        for family, arm in families.items():
            arms[f"{name}-{family}"] = {**changes, **arm, **layers}
    claims = (
        # Figure 3 and section 3.3: Soft MoE outperforms dense and sparse models "for any given FLOPs or time
        # budget". Arms of one size and capacity have about the same FLOPs.
        "family=soft beats best family=token_choice|expert_choice at equal size, capacity",
        "best family=soft beats best family=token_choice|expert_choice at equal size",
        "best family=soft beats family=dense at equal size",
    )
    space = families_space(scale)
    return Sweep(base=scale.base, arms=arms, claims=claims, space=space, published=published)


def printed_size(size: str) -> str:
    """``S/16`` for ``S16``."""
    return f"{size[0]}/{size[1:]}"


# Size, experts (0: dense), millions of steps, thousands of steps of cooldown. Rows that two tables print with
# different cooldowns are here with both.
TABLE_8 = (
    ("S16", 0, 4, 50),
    ("S16", 128, 4, 50),
    ("S16", 128, 10, 50),
    ("S14", 256, 4, 50),
    ("S14", 256, 10, 50),  # of table 1
    ("S14", 256, 10, 500),
    ("B16", 0, 4, 50),
    ("B16", 128, 4, 50),
    ("B16", 128, 9, 500),  # of table 1
    ("L16", 0, 4, 50),
    ("L16", 128, 1, 50),
    ("L16", 128, 2, 50),
    ("L16", 128, 4, 50),
    ("L16", 128, 4, 500),  # of table 1
    ("H14", 0, 1, 50),
    ("H14", 0, 2, 50),
    ("H14", 128, 1, 50),
    ("H14", 128, 2, 50),
    ("H14", 256, 1, 50),
    ("H14", 256, 2, 50),
)


@named()
def long_runs(scale: Scale) -> Sweep:
    """Dense and Soft MoE models trained for long: does the gain stay?

    Source: Soft MoE, section 3.4, figure 4, tables 1 and 8: 1M to 10M steps, cooldowns of 50,000 and 500,000,
    one slot per expert, MoE in the last half of the blocks. The steps of the base stand for the paper's 4M.
    Scales without its sizes train every size for a quarter, a half and the whole of them.
    """
    steps, arms, published = scale.base.train.steps, dict[str, Arm](), dict[str, str]()
    rows = [row for row in TABLE_8 if row[0] in scale.sizes] or [
        (name, experts, millions, 50)
        for name, experts, millions in product(scale.sizes, (0, scale.experts), (1, 2, 4))
    ]
    for name, experts, millions, cooldown in rows:
        changes = dict(scale.sizes[name])
        kind = f"{name}-soft-{experts}e" if experts else f"{name}-dense"
        arm = f"{kind}-{millions}M-cooldown{cooldown}k"
        if experts:
            layers = last_half(override(scale.base, changes))
            changes |= moe("soft", experts, slots_per_expert=1, layers=layers)
        arms[arm] = changes | {
            "train.steps": round(steps * millions / 4),
            "train.schedule.cooldown_steps": round(steps * cooldown / 4_000),
        }
        model = f"Soft MoE {printed_size(name)} {experts}E" if experts else f"ViT {printed_size(name)}"
        published[arm] = f"{model} {millions}M steps, cooldown {cooldown}k"
    # Tables 1 and 8, at S/16, B/16, L/16 and H/14.
    claims = ("best family=soft beats family=dense at equal size, steps",)
    return Sweep(base=scale.base, arms=arms, claims=claims, published=published)


# Experts and slots per token that figure 6 lacks. In the other cells one slot per expert is the most.
_NOT_TRAINED = {"soft": (), "expert": ((4096, 16),), "token": ((256, 1), (1024, 4))}


@named()
def slots_experts(scale: Scale) -> Sweep:
    """Experts x slots per token: what more experts bring at equal cost.

    Source: Soft MoE, section 3.5 and figure 6: at each number of slots (or choices) per token the number of
    experts varies up to one slot for each, and the FLOPs of the experts do not; Soft MoE, expert choice and
    token choice with batch prioritized routing. Two MoE layers fit the printed parameters of figure 23 and
    six do not; which two blocks, the group of 8 images, and K and C of token choice are ours.
    """
    tokens, arms, claims = scale.base.model.tokens(), dict[str, Arm](), list[str]()
    smallest = scale.experts // 4
    for x in scale.slots:
        counts = [smallest << i for i in range(32) if smallest << i <= tokens * x]
        for e in counts:
            k = min(x, 2)  # section 3.2: K of 1 and 2
            routers = {
                "soft": soft(e, x, tokens),
                "expert": expert_choice(e, x) if x <= e else None,
                "token": token_choice(e, k, x / k, priority="max"),
            }
            for family, arm in routers.items():
                if arm and (e, x) not in _NOT_TRAINED[family]:
                    arms[f"{family}-e{e}-x{x}"] = arm | {f"{MOE}.layers": "last_2"}
        # Section 3.5: "the best performing model at each number of slots-per-token is the model with the most
        # experts (i.e. one slot per expert)".
        if len(counts) > 1:
            fewer, most = (f"soft-e{e}-x{x}" for e in counts[:-1]), f"soft-e{counts[-1]}-x{x}"
            claims.append(f"arm={most} beats arm={'|'.join(fewer)}")
    if not arms:
        raise UsageError(f"slots_experts: {tokens} tokens have no slots for {smallest} experts")
    return Sweep(base=scale.base, arms=arms, claims=tuple(claims))


@named()
def slots(scale: Scale) -> Sweep:
    """Slots per expert at a fixed number of experts: how many are worth their cost?

    Source: Soft MoE, appendix C and figure 12: S/16 with 32 experts and 1 to 32 slots each, beside Experts
    Choice of as many tokens, in groups of 1 and 8 images. Layers are not printed: here the last half.
    """
    tokens, experts = scale.base.model.tokens(), scale.experts
    layers, arms = last_half(scale.base), dict[str, Arm]()
    for s in (1, 2, 3, 4, 8, 16, 32):
        if s > tokens:
            continue
        arms[f"soft-s{s}"] = moe("soft", experts, slots_per_expert=s, layers=layers)
        for images in (1, GROUP):
            c = s * experts / tokens
            arms[f"expert-s{s}-g{images}"] = expert_choice(experts, c, images=images, layers=layers)
    return Sweep(base=scale.base, arms=arms)


@named()
def ablations(scale: Scale) -> Sweep:
    """Soft MoE with parts of its routing taken out: which part carries the gain?

    Source: Soft MoE, section 3.6, appendix A and table 2: dispatch and combine learned, uniform, or the
    identity (token i to slot i), and the dense model; MoE in the last half of the blocks, an expert with one
    slot for every token. The paper's is S/14: 256 tokens, 256 experts.
    """
    tokens, layers = scale.base.model.tokens(), last_half(scale.base)
    rows = {
        "soft": ("soft", "soft"),
        "soft-uniform": ("soft", "uniform"),
        "uniform-soft": ("uniform", "soft"),
        "uniform": ("uniform", "uniform"),
        "identity": ("identity", "identity"),
    }
    arms: dict[str, Arm] = {"dense": {}}
    for name, (dispatch, combine) in rows.items():
        arms[name] = moe(
            "soft", tokens, layers=layers, slots_per_expert=1, dispatch=dispatch, combine=combine
        )
    claims = (  # of table 2, and of section 3.6
        # In 10-shot 74.8 % against 71.8, 70.0 and 69.1, and against 72.0, 70.0 and 69.1.
        "dispatch=soft, combine=soft beats dispatch=uniform|identity",
        "dispatch=soft, combine=soft beats combine=uniform|identity",
        # "Identity and Uniform routing substantially underperform Soft MoE, although they do outperform ViT."
        "dispatch=uniform|identity, combine=uniform|identity beats family=dense",
        # "Dispatch mixing appears slightly more important than the combine mixing."
        "dispatch=soft, combine=uniform beats dispatch=uniform, combine=soft",
    )
    return Sweep(base=scale.base, arms=arms, claims=claims)


# Blocks with experts among twelve, of tables 4 to 6: all experts in these blocks together are as many.
PLACES = ((11,), (10,), (10, 11), (5, 11), (8, 9, 10, 11), (2, 5, 8, 11))
PLACES += ((4, 5, 6, 7, 8, 9, 10, 11), (1, 2, 3, 4, 8, 9, 10, 11))


@named()
def moe_layers(scale: Scale) -> Sweep:
    """One layer with all experts or several with a part each, late or spread: where do experts pay?

    Source: Soft MoE, tables 4 to 6: S/16 with 512 experts in all, in 1, 2, 4 or 8 blocks; Soft
    MoE with one slot per expert, Experts Choice with c of 1, Tokens Choice with K of 1 and batch prioritized
    routing. At other depths the blocks keep their place in proportion, if they stay different.
    """
    model, arms = vit_of(scale.base), dict[str, Arm]()
    total = 2 ** ceil(log2(2 * model.tokens()))  # 512 for 196 tokens
    for place in PLACES:
        layers = tuple(dict.fromkeys((block + 1) * model.depth // 12 - 1 for block in place))
        if len(layers) < len(place) or layers[0] < 0:
            continue
        e, name = total // len(layers), "-".join(map(str, layers))
        arms[f"soft-in-{name}"] = moe("soft", e, slots_per_expert=1, layers=layers)
        arms[f"expert-in-{name}"] = expert_choice(e, 1, layers=layers)
        arms[f"token-in-{name}"] = token_choice(e, 1, priority="max", layers=layers)
    return Sweep(base=scale.base, arms=arms)


@named()
def token_choices(scale: Scale) -> Sweep:
    """K, experts and batch prioritized routing of token choice, one by one.

    Source: Soft MoE, table 7: S/16 with 32 and 64 experts, K of 1 and 2, with and without the
    priority. C is 1 and the layers are the last half, as in table 9; table 7 prints neither.
    """
    layers = last_half(scale.base)
    arms = {
        f"e{e}-k{k}{'-bpr' if priority == 'max' else ''}": token_choice(
            e, k, priority=priority, layers=layers
        )
        for e, k, priority in product((scale.experts, 2 * scale.experts), (1, 2), ("none", "max"))
    }
    # Table 7: the priority is the better in all four rows, or as good.
    claims = ("priority=max beats priority=none at equal experts, k",)
    return Sweep(base=scale.base, arms=arms, claims=claims)


@named()
def normalization(scale: Scale) -> Sweep:
    """Tokens and slots with and without their normalization, at rising width.

    Source: Soft MoE, section 2.3 and appendix E: without it the softmax of a wide model collapses to one
    token per slot. The paper's widths were not read: sizes and experts are those of the long runs.
    """
    arms: dict[str, Arm] = {}
    for name, changes in scale.sizes.items():
        layers = last_half(override(scale.base, changes))
        for normalize, label in (("vmoe", "normalized"), ("none", "plain")):
            router = moe("soft", 4 * scale.experts, slots_per_expert=1, normalize=normalize, layers=layers)
            arms[f"{name}-{label}"] = {**changes, **router}
    # Section 2.3: it is wide models that need it.
    claims = (f"arm={[*scale.sizes][-1]}-normalized beats arm={[*scale.sizes][-1]}-plain",)
    return Sweep(base=scale.base, arms=arms, claims=claims)


@named()
def choice_experts(scale: Scale) -> Sweep:
    """Token choice with and without priority, and expert choice, with few to many experts: which number?

    Source: Soft MoE, appendix B and figures 8 to 11, whose numbers are not printed: token choice with K of 1
    and 2 and a capacity of 1 and 1.125, expert choice with c of 1; 4 to 1024 experts, as far as every expert
    has a slot; groups of 8 images, the last half of the blocks.
    """
    layers, tokens = last_half(scale.base), GROUP * scale.base.model.tokens()
    arms: dict[str, Arm] = {}
    for e in (4**i for i in range(1, 6)):
        if e > tokens:
            break
        arms[f"expert-e{e}"] = expert_choice(e, 1.0, layers=layers)
        for k, c, first in product((1, 2), (1.0, 1.125), ("none", "max")):
            name = f"token-e{e}-k{k}-c{c}{'-bpr' if first == 'max' else ''}"
            arms[name] = token_choice(e, k, c, priority=first, layers=layers)
    # As table 7 at 32 and 64 experts.
    claims = ("priority=max beats priority=none at equal experts, k, capacity",)
    return Sweep(base=scale.base, arms=arms, claims=claims)


@named()
def augmentation(scale: Scale) -> Sweep:
    """Images resized, cropped and flipped, or distorted too, for each family: who gains from augmentation?

    Source: Soft MoE, appendix F.1 and figure 15, which is of contrastive training (the sweep
    `augmentation_contrastive`): Soft MoE gains, ViT and expert choice do not. Here with labels, MoE in the
    last half of the blocks, with one slot per token.
    """
    half, tokens = last_half(scale.base), scale.base.model.tokens()
    families: dict[str, Arm] = {
        "dense": {},
        "expert": expert_choice(scale.experts, 1.0, layers=half),
        "soft": soft(scale.experts, 1, tokens, layers=half),
    }
    kinds: dict[str, Arm] = {
        "resize": {"data.augment.inception": None, "data.augment.randaugment": None},
        "crop": {"data.augment.inception": {}, "data.augment.randaugment": None},
        "distort": {"data.augment.inception": {}, "data.augment.randaugment.operations": 2},
    }
    arms = {f"{f}-{kind}": {**arm, **data} for f, arm in families.items() for kind, data in kinds.items()}
    claims = (
        "arm=soft-crop beats arm=soft-resize",
        "arm=dense-resize|expert-resize beats arm=dense-crop|expert-crop at equal family",
    )
    return Sweep(base=scale.base, arms=arms, seeds=seeds(scale, 3), claims=claims)

"""The sweeps by name, each at several scales: ours, those of the papers, and a user's own."""

import inspect
from dataclasses import replace
from functools import partial
from importlib import import_module

from moe.guests import offered
from moe.model import unit_shapes
from orchestrator.codec import flat, override
from orchestrator.errors import UsageError
from orchestrator.plugins import error_in, function_of
from orchestrator.sweeps.arms import (
    MOE,
    Arm,
    NamedSweep,
    expert_choice,
    families_space,
    grouped,
    moe,
    named,
    seeds,
    soft,
    token_choice,
)
from orchestrator.sweeps.scales import CIFAR, TINY, UNCHANGED, Changes, Scale
from orchestrator.sweeps.sweep import Sweep

SHARP = 8.0  # scale of soft routers: the papers' 1 makes the routing of small models nearly uniform


@named()
def quickstart(scale: Scale) -> Sweep:
    """A dense model and three kinds of routing at each of several widths, with three seeds, on a laptop.

    Source: token choice from V-MoE, expert choice from Routers in Vision MoE (section 3.1), Soft MoE with one
    slot per expert, which Soft MoE (figure 6) and Implicit Bias in Soft MoE find best; at toy size.

    Design: a frontier can only be seen where accuracies differ by more than their errors, about .01 for three
    seeds; two seeds know their error too badly to decide a claim. A width that halves costs a third and loses
    20 points of accuracy, and experts in both blocks regain several at nearly the same cost. The digits stand
    anywhere among pieces of others, so that a model has to find them: a linear classifier fails. Unlike in
    V-MoE every image is routed by itself, because these are the arms for images of one's own, and a model
    that is used answers one image at a time.
    """
    tokens, experts = scale.base.model.tokens(), scale.experts
    kinds: dict[str, Arm] = {
        "dense": {},
        "token": token_choice(experts, 1, images=1, layers="last_2"),
        "expert": expert_choice(experts, 1.0, images=1, layers="last_2"),
        "soft": soft(tokens, 1, tokens, layers="last_2", scale_init=SHARP),
    }
    arms = {
        f"{name}-{kind}": {**size, **arm} for name, size in scale.sizes.items() for kind, arm in kinds.items()
    }
    claims = ("family=soft beats family=dense at equal size",)
    space = families_space(scale, images=1)
    return Sweep(base=scale.base, arms=arms, seeds=seeds(scale, 3), claims=claims, space=space)


def _of_the_papers(scale: Scale) -> dict[str, Arm]:
    """A dense model and five kinds of routing at equal cost.

    Source: token choice with and without priority from V-MoE (section 4), expert choice from Routers in
    Vision MoE (section 3.1), few and many experts for the same slots from Implicit Bias in Soft MoE (section
    4). But for Soft MoE, 8 images are routed together, as in V-MoE.
    """
    tokens, experts = scale.base.model.tokens(), scale.experts
    return {
        "dense": {},
        "token": token_choice(experts, 1),
        "token-priority": token_choice(experts, 1, priority="max"),
        "expert": expert_choice(experts, 1.0),
        f"soft-e{experts}": soft(experts, 1, tokens, scale_init=SHARP),
        f"soft-e{2 * experts}": soft(2 * experts, 1, tokens, scale_init=SHARP),
    }


@named()
def study(scale: Scale) -> Sweep:
    """A dense model and five kinds of routing at equal cost, with five seeds: the papers' part of `modern`.

    Source: V-MoE, Routers in Vision MoE, Implicit Bias in Soft MoE, as `_of_the_papers` says.
    """
    kinds = _of_the_papers(scale)
    arms = {
        f"{name}-{kind}": {**size, **arm} for name, size in scale.sizes.items() for kind, arm in kinds.items()
    }
    claims = ("family=soft beats family=dense at equal size",)
    return Sweep(base=scale.base, arms=arms, seeds=seeds(scale, 5), claims=claims)


@named()
def modern(scale: Scale) -> Sweep:
    """Routers of today's language models beside those of `study`, at equal cost, with five seeds;
    docs/study.md has its results.

    Source: those of `study`; loss-free balancing (Wang and others, 2024) as in torchtitan; quantile balancing
    as in Megatron-Core; a shared expert and fine-grained experts from DeepSeek-MoE (Dai and others, 2024);
    ReLU gates from ReMoE (Wang and others, 2024); the loss over a whole batch from Qwen3 (Qiu and others,
    2025).

    Design: every arm has the slots and about the hidden units of a dense model: smaller experts are more, and
    half of the units may be a shared MLP. `lossfree-0`, whose bias stays 0, shows what the bias does;
    `dropless`, which is `lossfree` without slots, what dropping costs. A bias moves by its rate at every
    step, so short runs take .01 and long ones the published .001. Claims are two-sided.
    """
    experts, of_the_papers, arms = scale.experts, _of_the_papers(scale), dict[str, Arm]()
    by_sign: Arm = {"balance.kind": "sign", "balance.rate": 1e-2 if scale.base.train.steps < 5_000 else 1e-3}
    still: Arm = by_sign | {"balance.rate": 0.0}
    by_quantile: Arm = {"balance.kind": "quantile"}
    sigmoid = partial(grouped, "top_k", score="sigmoid")
    lossfree = partial(sigmoid, **by_sign)
    whole_batch: Arm = {"balance_weight": 1e-2, "balance_level": "batch", "z_weight": 1e-3}
    today: dict[str, Arm] = {}
    for name, size in scale.sizes.items():
        half, quarter = ({f"{MOE}.expert_dim": size["model.mlp_dim"] // part} for part in (2, 4))
        shared = {f"{MOE}.shared_dim": size["model.mlp_dim"] // 2}
        control = {"lossfree-0": sigmoid(experts, k=1, **still)}
        today = {
            "lossfree": lossfree(experts, k=1),
            "dropless": lossfree(experts, k=1, capacity_factor="dropless"),
            "quantile": sigmoid(experts, k=1, **by_quantile),
            "shared": lossfree(2 * experts, k=1) | half | shared,
            "expert-shared": expert_choice(2 * experts, 1.0) | half | shared,
            "fine": lossfree(4 * experts, k=2, normalise=True) | quarter | shared,
            "relu": grouped("relu", experts, k=1),
            "global": grouped("top_k", 2 * experts, k=2, normalise=True, **whole_batch) | half,
        }
        kinds = of_the_papers | control | today
        arms |= {f"{name}-{kind}": {**size, **arm} for kind, arm in kinds.items()}
    named_today = "|".join(today)
    claims = (
        "kind!=dense|lossfree-0 beats kind=dense at equal cost",
        f"kind=soft-e{2 * experts} beats kind={named_today} at equal cost",
        f"kind={named_today} beats kind=token at equal cost",
    )
    return Sweep(base=scale.base, arms=arms, seeds=seeds(scale, 5), claims=claims)


@named(needs_weights=True)
def upcycle(scale: Scale) -> Sweep:
    """Mixtures whose experts are the MLPs of a trained dense model, beside that model, which goes on dense.

    Its base starts from weights, whose model it is. Experts are in the last half of the blocks.

    Source: Sparse Upcycling (Komatsuzaki and others, 2022), from a ViT to a V-MoE: its abstract for the
    claims, appendix B for copies without noise, in the last blocks, for C of 2 and weights that sum to 1.

    Design: every expert starts as a copy, and the router is new. `exact` keeps the function of the dense
    model: a softmax over the chosen experts alone sums to 1, and no token is dropped; its router learns from
    the auxiliary losses until the experts differ. So does `mixture`. `token` is weighted as V-MoE is, by its
    share of the softmax over all experts, which is below 1 at first. `token-k2` and `expert` are as
    published: they keep the function for the tokens that an expert takes. But for `soft` and `mixture`, 8
    images are routed together, as in V-MoE. To go on as published, the base takes over the optimiser's state
    (`train.init_optimizer`) and the dense run's rate (`train.schedule.begin`).
    """
    model, experts = scale.base.model, scale.experts
    last = f"last_{max(1, len(unit_shapes(model)) // 2)}"
    tokens = model.tokens()
    arms: dict[str, Arm] = {
        "dense": {MOE: None},
        "exact": token_choice(experts, 1, float(experts), layers=last, topk="before"),
        "token": token_choice(experts, 1, 1.05, layers=last),
        "token-k2": token_choice(experts, 2, 1.05, layers=last, topk="before"),
        "expert": expert_choice(experts, 2.0, layers=last, normalize=True),
        "soft": soft(experts, 1, tokens, layers=last, scale_init=SHARP),
        "mixture": moe("mixture", experts, layers=last),
    }
    claims = ("arm=token-k2 beats arm=dense", "arm=expert beats arm=dense")
    return Sweep(base=scale.base, arms=arms, seeds=seeds(scale, 3), claims=claims)


SWEEPS: dict[str, NamedSweep] = {sweep.name: sweep for sweep in (quickstart, study, modern, upcycle)}
SWEEPS |= {name: getattr(import_module(module), name) for name, module in offered("SWEEPS").items()}
SCALES: dict[str, Scale] = {"tiny": TINY, "cifar": CIFAR}
SCALES |= {name: import_module(module).SCALES[name] for name, module in offered("SCALES").items()}


def make_sweep(name: str, scale: str, changes: Changes = UNCHANGED) -> Sweep:
    """A named sweep, or that of a user's own file: ``my_sweep.py:make``, a function of a `Scale`, or of
    nothing.

    Args:
        changes: of the base, before its arms are made: slots and experts follow the tokens that there are. An
            arm that sets such a field itself keeps its value, and a dense arm stays dense.

    Raises:
        UsageError: for a name, a scale, a file or a function that is not there, and for a change that every
            arm would undo.
    """
    if scale not in SCALES:
        raise UsageError(f"unknown scale {scale!r}; known: {', '.join(SCALES)}")
    if ":" not in name and name not in SWEEPS:
        raise UsageError(
            f"unknown sweep {name!r}; known: {', '.join(SWEEPS)}, or your own as path/to/file.py:function"
        )
    if ":" not in name and not SWEEPS[name].runs_at(SCALES[scale]):
        known = ", ".join(other for other, each in SCALES.items() if SWEEPS[name].runs_at(each))
        raise UsageError(f"the sweep {name} has no recipe at the scale {scale!r}; it has one at {known}")
    if isinstance(model := changes.get("model"), dict):
        # A model by its name has the classes of the scale, whose loss starts from their number.
        own = SCALES[scale].of(name, UNCHANGED).base.model
        kept = {name: getattr(own, name) for name in ("num_classes", "head_bias") if name in model}
        changes = {**changes, "model": model | kept}
    sweep = _changed(name, scale, changes)
    for field in changes:
        if sweep.arms and field.startswith(("model.", "train.")):
            others = {other: value for other, value in changes.items() if other != field}
            runs, value = sweep.runs(), flat(sweep.base).get(field)
            try:
                without = _changed(name, scale, others)
                same = runs == without.runs()
            except UsageError:  # The other changes need this one, as a patch size needs its image size.
                continue
            has_it = all(flat(run).get(field) == value for run in runs.values())
            if same and not has_it and flat(without.base).get(field) != value:
                raise UsageError(f"{field} changes nothing: every arm of {name} that could have it sets it")
    return sweep


def _changed(name: str, scale: str, changes: Changes) -> Sweep:
    if ":" in name:
        sweep = _of_user(name, SCALES[scale].of("", changes))
    else:
        sweep = _dense_stays(SWEEPS[name](SCALES[scale], changes))
    return replace(sweep, base=override(sweep.base, changes))


def _dense_stays(sweep: Sweep) -> Sweep:
    """The sweep whose dense arms have no experts even if the changes of the base give it some."""
    if not sweep.base.model.moe:
        return sweep
    arms = {
        arm: changes if any(field.startswith(MOE) for field in changes) else {**changes, MOE: None}
        for arm, changes in sweep.changes.items()
    }
    return replace(sweep, arms=arms)


def _of_user(name: str, scale: Scale) -> Sweep:
    make = function_of(name)
    try:
        sweep = make(scale) if inspect.signature(make).parameters else make()
    except UsageError:
        raise
    except Exception as error:  # the user's own code
        raise error_in(name, error) from error
    if not isinstance(sweep, Sweep):
        raise UsageError(f"{name} must return a Sweep, got {type(sweep).__name__}")
    return sweep

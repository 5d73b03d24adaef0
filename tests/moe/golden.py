"""Our routers, layers and models against arrays of independent reference implementations.

  python -m tests.moe.golden DIR [DIR ...]

Runs every .npz of the folders and prints a line per case: each array's largest error over its largest entry.
Exit code 1 if a forward array is off by more than 3e-5, a gradient by more than 1e-4, a dispatch differs, or
a file is of no known family. What belongs to later work says `not yet`, which is not a failure.

The files come from google-research/vmoe run in JAX, POT, and plain-Python algorithms; they hold their own
description in `meta`. Transport plans are solved here in float64 until they converge. Not compared: the bf16
dispatcher's `y_bf16`, which we do not have.
"""

import json
import re
import sys
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

import moe.routers.affinity
import moe.routers.soft
from moe.adapt import resize_position
from moe.experts import Experts
from moe.layer import MoEConfig
from moe.routers import ExpertChoiceConfig, RouterConfig, SoftConfig, TokenChoiceConfig
from moe.routers.affinity import SinkhornConfig, SparseTransportConfig
from moe.routers.capacity import CapacityConfig
from moe.routers.expert_choice import ExpertChoiceRouter
from moe.routers.losses import balance_loss, importance_loss, load_loss
from moe.routers.sinkhorn import sinkhorn_plan
from moe.routers.soft import SoftRouter
from moe.routers.sparse_transport import sparse_plan
from moe.routers.token_choice import TokenChoiceRouter, top_experts
from moe.routing import Routing
from moe.vit import ViT, ViTConfig
from orchestrator.config import AdamWConfig, CosineConfig, LinearConfig, RsqrtConfig, SGDConfig
from orchestrator.training.optim import build_optimizer, learning_rate
from tests.moe.flax_names import from_flax

FORWARD, GRADIENT, DUAL = 3e-5, 1e-4, 1e-3
MOST_ITERATIONS = 500_000  # of Sinkhorn; few tokens with logits around 100 need many
EXPERT_WEIGHTS = {"w_in_EDF": "W1", "b_in_EF": "b1", "w_out_EFD": "W2", "b_out_ED": "b2"}
ABLATIONS = {  # name -> dispatch, combine
    "identity": ("identity", "identity"),
    "uniform": ("uniform", "uniform"),
    "soft_uniform": ("soft", "uniform"),
    "uniform_soft": ("uniform", "soft"),
}


class NotYet(Exception):
    pass


@dataclass(frozen=True, kw_only=True)
class FixedTokenChoice(TokenChoiceConfig):
    """The files that give a capacity instead of a factor."""

    fixed: int

    def slots(self, *, num_tokens: int, num_experts: int) -> int:
        return self.fixed


@dataclass(frozen=True, kw_only=True)
class FixedExpertChoice(ExpertChoiceConfig):
    fixed: int

    def slots(self, *, num_tokens: int, num_experts: int) -> int:
        return self.fixed


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was compared in one case: (array, error, failed)."""

    nan_fields: tuple[str, ...] = ()
    lines: list[tuple[str, str, bool]] = field(default_factory=list)

    def close(self, name: str, got: Tensor, expected: Tensor, tolerance: float = FORWARD) -> None:
        if got.shape != expected.shape:
            self.lines.append((name, f"shape {tuple(got.shape)}, not {tuple(expected.shape)}", True))
            return
        if name in self.nan_fields:  # the reference has no number here; ours must be one
            self.lines.append((name, "finite", not got.isfinite().all()))
            return
        largest = expected.abs().max().item() if expected.numel() else 0.0
        error = (got.detach().double() - expected.double()).abs().max().item() if expected.numel() else 0.0
        relative = error / largest if largest else error
        self.lines.append((name, f"{relative:.1e}", not relative <= tolerance))

    def gradient(self, name: str, got: Tensor | None, expected: Tensor) -> None:
        self.close(
            name, torch.zeros_like(expected) if got is None else got.view_as(expected), expected, GRADIENT
        )

    def exact(self, name: str, same: bool) -> None:
        self.lines.append((name, "exact" if same else "differs", not same))

    def bound(self, name: str, value: float, most: float) -> None:
        self.lines.append((name, f"{value:.1e}", not value <= most))

    def failed(self) -> bool:
        return not self.lines or any(bad for *_, bad in self.lines)

    def __str__(self) -> str:
        return "  ".join(f"{name} {text}{' <-- FAIL' * bad}" for name, text, bad in self.lines)


Arrays = dict[str, Tensor]
Meta = dict[str, Any]


def check(path: Path) -> Report:
    """Raises NotYet for a family that waits for its code, ValueError for one that nobody knows."""
    with np.load(path) as file:  # no pickle: strings and numbers alone
        meta = json.loads(str(file["meta"]))
        arrays = {name: torch.from_numpy(np.array(file[name])) for name in file.files if name != "meta"}
    family = meta["router"]
    if family not in FAMILIES:
        raise ValueError(f"unknown family {family!r}; known: {', '.join(FAMILIES)}")
    report = Report(nan_fields=tuple(meta.get("nan_fields") or ()))
    FAMILIES[family](arrays, meta, report)
    return report


def softmax_choice(z: Arrays, meta: Meta, report: Report) -> None:
    """Token choice and expert choice by the softmax."""
    c = meta["config"]
    router = _router(z, meta)
    routing = _layer(z, meta, report, router, {"gate_DE": "W"})
    report.close("gates", routing.gates_GSE, z["gates"])
    if "topk_expert_index" in z:
        chosen_GSK = top_experts(routing.gates_GSE, c["num_selected_experts"])
        report.exact("topk_expert_index", torch.equal(chosen_GSK, z["topk_expert_index"].long()))
        report.close("topk_combine", routing.gates_GSE.gather(-1, chosen_GSK), z["topk_combine"])
    if "auxiliary_loss" not in z or "f32_underflow" in meta["flags"]:
        return
    report.close("auxiliary_loss", routing.aux_G, z["auxiliary_loss"])
    for name, loss_G in _losses(z, meta).items():
        report.close(name, loss_G[0], z[name])
        if f"{name}_grad_W" in z:
            report.gradient(f"{name}_grad_W", loss_G[1], z[f"{name}_grad_W"])
    if "aux_grad_W" in z:
        x = z["x"].clone().requires_grad_()
        router.zero_grad()
        with _noise(z):
            aux_G = router(*_inputs(x, meta, z)).aux_G
        if aux_G.requires_grad:
            aux_G.mean().backward()
        if "aux_grad_x" in z:
            report.gradient("aux_grad_x", x.grad, z["aux_grad_x"])
        report.gradient("aux_grad_W", router.get_parameter("gate_DE").grad, z["aux_grad_W"])


def _losses(z: Arrays, meta: Meta) -> dict[str, tuple[Tensor, Tensor | None]]:
    """Each auxiliary loss alone, unweighted: (G,), and the gradient of its mean for W."""
    c, found = meta["config"], {}
    for name in ("importance_loss", "load_loss", "gshard_loss"):
        if name not in z:
            continue
        W = z["W"].clone().requires_grad_()
        x_GSD, valid_GS, *_ = _inputs(z["x"], meta, z)
        logits_GSE = x_GSD @ W
        std = c["noise_std"] / c["num_experts"]
        noisy_GSE = logits_GSE + std * z["noise"] if "noise" in z else logits_GSE
        if name == "importance_loss":
            loss_G = importance_loss(logits_GSE.softmax(-1), valid_GS)
        elif name == "gshard_loss":
            loss_G = balance_loss(noisy_GSE.softmax(-1), valid_GS)
        else:
            loss_G = load_loss(logits_GSE, noisy_GSE, valid_GS, k=c["num_selected_experts"], std=std)
        loss_G.mean().backward()
        found[name] = (loss_G, W.grad)
    return found


def sinkhorn_choice(z: Arrays, meta: Meta, report: Report) -> None:
    """Token choice and expert choice by the converged entropic plan, in float64."""
    z = {name: array.double() if array.is_floating_point() else array for name, array in z.items()}
    x_GSD, valid_GS, *_ = _inputs(z["x"], meta, z)
    iterations = 1000
    plan_GSE, residual_G = sinkhorn_plan(x_GSD @ z["W"], valid_GS, iterations)
    while residual_G.max() > 1e-9 and iterations < MOST_ITERATIONS:
        iterations *= 8
        plan_GSE, residual_G = sinkhorn_plan(x_GSD @ z["W"], valid_GS, iterations)
    report.close("plan", plan_GSE, z["plan"])
    router = _router(z, meta, affinity=SinkhornConfig(iterations=iterations)).double()
    fragile = "plan_ties_fragile" in meta["flags"]  # rounding would decide: the rest is checked on their plan
    plan = patch.object(moe.routers.affinity, "sinkhorn_plan", lambda *_: (z["plan"], None))
    with plan if fragile else nullcontext():
        routing = _layer(z, meta, report, router, {"gate_DE": "W"})
    report.close("softmax", routing.gates_GSE, z["softmax"])


def sparse_choice(z: Arrays, meta: Meta, report: Report) -> None:
    """The plan by its constraints, objective and dual bound; dispatch and the rest from the file's plan."""
    c = meta["config"]
    S, E, C = c["group_size"], c["num_experts"], c["resolved_capacity"]
    x_GSD, valid_GS, *_ = _inputs(z["x"].double(), meta, z)
    scores_GSE = (x_GSD @ z["W"].double()).softmax(-1)
    plan_GSE, bound_G, residual_G = sparse_plan(scores_GSE, valid_GS, C, 20_000)
    used = int((plan_GSE != 0).sum(1).max())
    report.lines.append(("nonzeros", f"{used} of {C}", used > C))
    if E * C >= S:  # else even full columns cannot take all tokens
        report.bound("columns", (plan_GSE.sum(1) - S / E).abs().max().item(), 1e-6)
    objective_G = (plan_GSE * scores_GSE).sum((1, 2)) - 0.5 * plan_GSE.square().sum((1, 2))
    for g, theirs in enumerate(meta["per_group"]):
        if E * C == S:
            best = theirs.get("objective_exact", theirs["semidual_optimum"])
            report.bound(f"objective[{g}]", abs(objective_G[g].item() - best), 1e-6)
            report.bound(f"rows[{g}]", residual_G[g].item(), 0)
        else:
            report.bound(f"dual[{g}]", abs(bound_G[g].item() - theirs["semidual_optimum"]), DUAL)
            if "objective_exact" in theirs:
                report.bound(f"exact-dual[{g}]", theirs["objective_exact"] - bound_G[g].item(), 1e-6)
            report.lines.append((f"rows[{g}]", f"off by {residual_G[g].item():.2f}", False))
    if "plan_exact" in z and E * C == S:
        report.close("plan_exact", plan_GSE, z["plan_exact"])

    router = _router(z, meta, affinity=SparseTransportConfig())
    with patch.object(moe.routers.affinity, "sparse_plan", lambda *_: (z["plan_vmoe20"], None, None)):
        routing = _layer(z, meta, report, router, {"gate_DE": "W"})
    report.close("softmax", routing.gates_GSE, z["softmax"])


def soft(z: Arrays, meta: Meta, report: Report) -> None:
    """Soft MoE and its ablations."""
    c = meta["config"]
    dispatch, combine = ABLATIONS.get(c.get("ablation"), ("soft", "soft"))
    config = SoftConfig(
        slots_per_expert=z["mu"].shape[2],
        normalize=c["normalize"],
        dispatch=dispatch,
        combine=combine,
        noise_std=c.get("noise_std", 0.0),
    )
    router = SoftRouter(config, dim=len(z["mu"]), num_experts=c["num_experts"])
    names = {name for name, _ in router.named_parameters()}
    weights = {ours: theirs for ours, theirs in (("phi_DEC", "mu"), ("scale", "scale")) if ours in names}
    _layer(z, meta, report, router, weights)


def _router(z: Arrays, meta: Meta, **changes: Any) -> nn.Module:
    """The router as the file describes it."""
    c = meta["config"]
    size = {"dim": len(z["W"]), "num_experts": c["num_experts"]}
    given = c["capacity_args"]
    fields = {
        "capacity_factor": given.get("capacity_factor", 1.0),
        "capacity_rounding": given["capacity_ceil_or_round"],
        "capacity_multiple_of": given["capacity_multiple_of"] or 1,
        "noise_std": c.get("noise_std", 0.0),
        "combine": "affinity" if c.get("combine") == "plan" else "softmax",
        **changes,
    }
    fixed = {"fixed": given["capacity"]} if "capacity" in given else {}
    if "token_choice" not in meta["router"]:
        return ExpertChoiceRouter(
            (FixedExpertChoice if fixed else ExpertChoiceConfig)(**fields, **fixed), **size
        )
    config = (FixedTokenChoice if fixed else TokenChoiceConfig)(
        **fields,
        **fixed,
        k=c["num_selected_experts"],
        priority="max" if c["batch_priority"] else "none",
        importance_weight=c.get("importance_loss_weight", 0.0),
        load_weight=c.get("load_loss_weight", 0.0),
        balance_weight=c.get("gshard_loss_weight", 0.0),
    )
    return TokenChoiceRouter(config, **size)


def _inputs(x: Tensor, meta: Meta, z: Arrays) -> tuple[Tensor, Tensor, Tensor | None]:
    """x_GSD, valid_GS, and keys_GS where the file has noise: what they would draw comes from the file."""
    x_GSD = x.reshape(-1, meta["config"]["group_size"], x.shape[-1])
    valid_GS = torch.ones(x_GSD.shape[:2], dtype=x.dtype)
    return x_GSD, valid_GS, valid_GS.long() if "noise" in z else None


def _noise(z: Arrays) -> ExitStack:
    """The file's draw in place of ours."""

    def draw(keys: Tensor) -> Tensor:
        return z["noise"].reshape(keys.shape)

    stack = ExitStack()
    for module in (moe.routers.affinity, moe.routers.soft):
        stack.enter_context(patch.object(module, "normal", draw))
    return stack


def _layer(z: Arrays, meta: Meta, report: Report, router: nn.Module, weights: dict[str, str]) -> Routing:
    """Dispatch, combine, output, and every gradient of sum(y * r). `weights`: our name -> the file's."""
    E, D, F = z["W1"].shape
    experts = Experts(E, D, F).to(z["x"].dtype)
    with torch.no_grad():
        for module, names in ((router, weights), (experts, EXPERT_WEIGHTS)):
            assert {name for name, _ in module.named_parameters()} == set(names)
            for ours, theirs in names.items():
                module.get_parameter(ours).copy_(z[theirs])
    x = z["x"].clone().requires_grad_()
    x_GSD, valid_GS, keys_GS = _inputs(x, meta, z)
    with _noise(z):
        routing = router(x_GSD, valid_GS, keys_GS)
    G, S, _, C = z["dispatch"].shape
    if isinstance(router.config, CapacityConfig):
        slots = router.config.slots(num_tokens=S, num_experts=E)
        report.exact("capacity", slots == meta["config"]["resolved_capacity"] == C)
    D_EGCS = routing.dispatch(torch.eye(S, dtype=x.dtype).expand(G, S, S)).view(E, G, C, S)
    one_hot = torch.eye(E * C, dtype=x.dtype).view(E, 1, C, E * C).expand(-1, G, -1, -1).flatten(1, 2)
    dispatch, combine = D_EGCS.permute(1, 3, 0, 2), routing.combine(one_hot).view(G, S, E, C)
    if z["dispatch"].dtype == torch.uint8:
        report.exact("dispatch", torch.equal(dispatch, z["dispatch"].to(dispatch.dtype)))
    else:
        report.close("dispatch", dispatch, z["dispatch"])
    report.close("combine", combine, z["combine"])
    y = routing.combine(experts(routing.dispatch(x_GSD))).reshape(x.shape)
    report.close("y", y, z["y"])
    (y * z["r"]).sum().backward()
    if "grad_x" in z:
        report.gradient("grad_x", x.grad, z["grad_x"])
    for module, names in ((router, weights), (experts, EXPERT_WEIGHTS)):
        for ours, theirs in names.items():
            if f"grad_{theirs}" in z:
                report.gradient(f"grad_{theirs}", module.get_parameter(ours).grad, z[f"grad_{theirs}"])
    return routing


def capacity(z: Arrays, meta: Meta, report: Report) -> None:
    """-1 is the reference's ValueError."""
    columns = ("num_tokens", "num_experts", "capacity_factor", "mode", "multiple_of", "capacity")
    rows = list(zip(*(z[name].tolist() for name in columns), strict=True))
    wrong = []
    for assignments, experts, factor, mode, multiple, expected in rows:
        config = CapacityConfig(
            capacity_factor=factor,
            capacity_rounding="ceil" if mode == 0 else "round",
            capacity_multiple_of=multiple or 1,
        )
        try:
            slots = config.capacity(assignments, experts)
        except ValueError:
            slots = -1
        if slots != expected:
            wrong.append((assignments, experts, factor, mode, multiple, slots, expected))
    report.lines.append((f"{len(rows)} rows", str(wrong[:3]) if wrong else "exact", bool(wrong)))


def model(z: Arrays, meta: Meta, report: Report) -> None:
    """Logits, auxiliary loss, and the gradients of sum(logits * r) + the mean auxiliary loss."""
    config = _model_config(z, meta["config"])
    network = ViT(config)
    flax, gradients = (
        from_flax({k.removeprefix(p): v for k, v in z.items() if k.startswith(p)}, config)
        for p in ("param/", "grad/")
    )
    network.load_state_dict(flax)
    output = network(z["images"].permute(0, 3, 1, 2), return_routings=True)
    report.close("logits", output.logits, z["logits"])
    aux_G = torch.stack([r.aux_G for r in output.routings]).sum(0) if output.routings else torch.zeros(1)
    report.close("auxiliary_loss", aux_G, torch.tensor(meta["auxiliary_loss"]).expand_as(aux_G))
    ((output.logits * z["r"]).sum() + output.aux).backward()
    whole = sum(v.numel() for k, v in z.items() if k.startswith("grad/"))
    report.exact("parameters", whole == sum(p.numel() for p in network.parameters()))
    worst = Report()
    for name, parameter in network.named_parameters():
        worst.gradient(f"grad {name}", parameter.grad, gradients[name])
    shown = [line for line in worst.lines if line[2]] or [max(worst.lines, key=lambda line: float(line[1]))]
    report.lines.extend(shown)


def _model_config(z: Arrays, c: Meta) -> ViTConfig:
    encoder, images = c["encoder"], z["images"]
    pooling = c["classifier"]
    assert pooling in ("token", "gap", "map")
    position = "learned" if "param/Encoder/posembed_input/pos_embedding" in z else "sincos2d"
    if encoder.get("position_emb", {}).get("name") == "none":
        position = "none"
    patches = (images.shape[1] // c["patch_size"][0]) ** 2
    given, moe_config = encoder["moe"], None
    if given.get("layers"):
        moe_config = MoEConfig(
            layers=tuple(given["layers"]),
            num_experts=given["num_experts"],
            images_per_group=given["group_size"] // (patches + (pooling == "token")),
            router=_model_router(given["router"], z),
        )
    return ViTConfig(
        image_size=images.shape[1],
        patch_size=c["patch_size"][0],
        width=c["hidden_size"],
        depth=encoder["num_layers"],
        heads=encoder["num_heads"],
        mlp_dim=encoder["mlp_dim"],
        num_classes=c["num_classes"],
        pooling=pooling,
        position=position,
        representation_size=c.get("representation_size"),
        qk_norm=encoder.get("attention_qk_norm", False),
        moe=moe_config,
    )


def _model_router(router: Meta, z: Arrays) -> RouterConfig:
    if "SoftRouter" in router.get("name", ""):
        slots = next(array.shape[2] for name, array in z.items() if name.endswith("Router/mu"))
        return SoftConfig(slots_per_expert=slots)
    dispatcher = router["dispatcher"]
    capacity = {
        "capacity_factor": dispatcher["capacity_factor"],
        "capacity_rounding": dispatcher.get("capacity_ceil_or_round", "ceil"),
        "capacity_multiple_of": dispatcher.get("capacity_multiple_of", 4) or 1,
    }
    if "num_selected_experts" not in router:
        return ExpertChoiceConfig(**capacity)
    return TokenChoiceConfig(
        **capacity,
        k=router["num_selected_experts"],
        priority="max" if dispatcher.get("batch_priority") else "none",
        importance_weight=router.get("importance_loss_weight", 1.0),  # the reference's class defaults
        load_weight=router.get("load_loss_weight", 1.0),
        balance_weight=router.get("gshard_loss_weight", 0.0),
    )


def schedule(z: Arrays, meta: Meta, report: Report) -> None:
    """The reference evaluates in float32."""
    c = meta["config"]
    rates = [_rate(c, int(step), c["total_steps"]) for step in z["steps"]]
    report.close("lr", torch.tensor(rates, dtype=torch.float64), z["lr"])


def _rate(c: Meta, step: int, total: int) -> float:
    end_frac = c.get("end_value", 0.0) / c["peak_value"]
    configs = {
        "big_vision_rsqrt": lambda: RsqrtConfig(
            warmup_steps=c["warmup_steps"], cooldown_steps=c["cooldown_steps"], timescale=c["timescale"]
        ),
        "warmup_linear_decay": lambda: LinearConfig(warmup_steps=c["warmup_steps"], end_frac=end_frac),
        "warmup_cosine_decay": lambda: CosineConfig(warmup_steps=c["warmup_steps"], end_frac=end_frac),
    }
    return learning_rate(configs[c["schedule"]](), step, peak=c["peak_value"], total=total)


def optimizer(z: Arrays, meta: Meta, report: Report) -> None:
    """The file's updates from its gradients; which tensors decay is our rule, given our names."""
    c = meta["config"]
    theirs = [name.removeprefix("param0/") for name in z if name.startswith("param0/")]
    module = nn.Module()
    params = {}
    for i, name in enumerate(theirs):
        owner, leaf = f"/{name}".split("/")[-2:]
        if owner != "head":
            owner, leaf = f"part{i}", "w_in_EDF" if leaf == "kernel" else leaf
        else:
            leaf = "weight" if leaf == "kernel" else leaf
        if not hasattr(module, owner):
            module.add_module(owner, nn.Module())
        params[name] = nn.Parameter(z[f"param0/{name}"].clone())
        module.get_submodule(owner).register_parameter(leaf, params[name])
    decay = dict(c.get("weight_decay") or [])
    config = (
        AdamWConfig(
            beta1=c.get("b1", 0.9),
            beta2=c.get("b2", 0.999),
            weight_decay=decay.get(".*/kernel", 0.0),
            weight_decay_head=decay.get("head/kernel", decay.get(".*/kernel", 0.0)),
        )
        if c["name"] == "adam"
        else SGDConfig(momentum=c["momentum"])
    )
    built = build_optimizer(config, module)
    if decay.keys() - {"head/kernel", ".*/kernel"}:  # rules that we have no field for, on the same optimiser
        built.param_groups.clear()
        for name, param in params.items():
            built.add_param_group({"params": [param], "weight_decay": _first_match(decay, name)})
    updates = sum(name.startswith("grad") for name in z) // len(theirs)
    for t in range(updates):
        for group in built.param_groups:
            group["lr"] = _rate(c["learning_rate"], t, c["total_steps"])
        for name, param in params.items():
            param.grad = z[f"grad{t}/{name}"].clone()
        if c.get("gradient_clip"):
            nn.utils.clip_grad_norm_(params.values(), c["gradient_clip"]["global_norm"])
        built.step()
    for name, param in params.items():
        report.close(f"{name} after {updates}", param, z[f"param{updates}/{name}"])


def _first_match(decay: dict[str, float], name: str) -> float:
    return next((value for rule, value in decay.items() if re.search(rule, name)), 0.0)


def posemb_zoom(z: Arrays, meta: Meta, report: Report) -> None:
    resized = resize_position(z["source"][0], meta["old_grid"], meta["new_grid"], class_token=True)
    report.close("target", resized, z["target"][0])


def not_yet(z: Arrays, meta: Meta, report: Report) -> None:
    raise NotYet


FAMILIES: dict[str, Callable[[Arrays, Meta, Report], None]] = {
    "softmax_token_choice": softmax_choice,
    "softmax_expert_choice": softmax_choice,
    "sinkhorn_token_choice": sinkhorn_choice,
    "sinkhorn_expert_choice": sinkhorn_choice,
    "sparsity_constrained_expert_choice": sparse_choice,
    "soft_moe": soft,
    "soft_moe_ablation": soft,
    "capacity": capacity,
    "model": model,
    "schedule": schedule,
    "optimizer": optimizer,
    "posemb_zoom": posemb_zoom,
    "fewshot": not_yet,
}


def main(folders: list[str]) -> int:
    paths = sorted(path for folder in folders for path in Path(folder).glob("*.npz"))
    if not paths:
        print(__doc__, f"\nno .npz in {folders}" if folders else "", file=sys.stderr)
        return 1
    torch.set_num_threads(1)
    counts = {"ok": 0, "FAIL": 0, "not yet": 0}
    for path in paths:
        try:
            report = check(path)
            verdict, text = "FAIL" if report.failed() else "ok", str(report)
        except NotYet:
            verdict, text = "not yet", ""
        except Exception as error:  # the cases after it still count
            verdict, text = "FAIL", f"{type(error).__name__}: {error}"
        counts[verdict] += 1
        print(f"{verdict:8}{path.stem}  {text}".rstrip(), flush=True)
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    return int(counts["FAIL"] > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Golden cases of routers and of the capacity table."""

from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import moe.routers.affinity
import moe.routers.soft
from moe.routers import ExpertChoiceConfig, SoftConfig, TokenChoiceConfig
from moe.routers.affinity import SinkhornConfig, SparseTransportConfig, sinkhorn_plan
from moe.routers.choice import CapacityConfig
from moe.routers.expert_choice import ExpertChoiceRouter
from moe.routers.hash import by_number, by_signs
from moe.routers.soft import SoftRouter
from moe.routers.sparse_transport import sparse_plan
from moe.routers.token_choice import TokenChoiceRouter, gshard_loss, importance_loss, load_loss, top_experts
from moe.routing import Routing
from tests.golden_report import EXPERTS, Arrays, Meta, Report, experts_of, set_weights

DUAL = 1e-3  # absolute, of the sparse plans' dual bound
MOST_ITERATIONS = 500_000  # of Sinkhorn; few tokens with logits around 100 need many
ABLATIONS = {  # name -> dispatch, combine
    "identity": ("identity", "identity"),
    "uniform": ("uniform", "uniform"),
    "soft_uniform": ("soft", "uniform"),
    "uniform_soft": ("uniform", "soft"),
}


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
            loss_G = gshard_loss(noisy_GSE.softmax(-1), valid_GS)
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
    # The authors' code stops after 20 iterations.
    early, _ = sinkhorn_plan(x_GSD @ z["W"], valid_GS, 20)
    report.bound("plan_vmoe20", (early - z["plan_vmoe20"]).abs().max().item(), 3e-5)
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


def hashed(z: Arrays, meta: Meta, report: Report) -> None:
    """The expert of each token by a fixed rule."""
    if meta["family"] == "hash_random":
        found = by_number(z["ids"].long(), meta["experts"], meta["seed"])
        report.exact("expert", torch.equal(found, z["expert"].long()))
    elif meta["family"] == "hash_signs":
        found = by_signs(z["x"].unsqueeze(0), z["planes"], meta["experts"])[0]
        report.exact("expert", torch.equal(found, z["expert"].long()))


def one_expert(z: Arrays, meta: Meta, report: Report) -> None:
    """Pairs of inputs that one expert of Soft MoE cannot tell apart, though their norms differ."""
    width = meta["width"]
    for row in z["rows"]:
        sign, c = row[:2].tolist()
        phi_D, one_D, other_D, norms = row[2:].split([width, width, width, 2])
        found = [lone_slot(x_SD, phi_D) for x_SD in pair(sign, c, tokens=meta["tokens"], width=width)]
        report.close(f"slots, sign {sign:g}, c {c:g}", torch.stack(found), torch.stack([one_D, other_D]))
        of_inputs = [x_SD.norm() for x_SD in pair(sign, c, tokens=meta["tokens"], width=width)]
        report.close("norms", torch.stack(of_inputs), norms)


def pair(sign: float, c: float, *, tokens: int, width: int) -> tuple[Tensor, Tensor]:
    """Returns the two inputs of theorem 1 of Implicit Bias in Soft MoE, for the sign of the first weight of
    the slot: of length sqrt(tokens) c and c, or, for 0, c and c / sqrt(tokens).
    """
    one, other = torch.zeros(2, tokens, width, dtype=torch.float64)
    if sign:
        one[:, 0], one[0, 0], other[0, 0] = -c * sign, c * sign, c * sign
    else:
        one[0, 0], other[:, 0] = c, c / tokens
    return one, other


def lone_slot(x_SD: Tensor, phi_D: Tensor) -> Tensor:
    """Returns the only slot of a Soft MoE with one expert and no normalisation."""
    router = SoftRouter(SoftConfig(normalize="none"), dim=len(phi_D), num_experts=1).to(x_SD.dtype)
    with torch.no_grad():
        router.get_parameter("phi_DEC").copy_(phi_D.view(-1, 1, 1))
        x_GSD = x_SD.unsqueeze(0)
        return router(x_GSD, torch.ones(x_GSD.shape[:2], dtype=x_SD.dtype)).dispatch(x_GSD)[0, 0]


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
        gshard_balance_weight=c.get("gshard_loss_weight", 0.0),
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
        stack.enter_context(patch.object(module, "gaussian", draw))
    return stack


def _layer(z: Arrays, meta: Meta, report: Report, router: nn.Module, weights: dict[str, str]) -> Routing:
    """Dispatch, combine, output, and every gradient of sum(y * r). `weights`: our name -> the file's."""
    E = len(z["W1"])
    experts = experts_of(z)
    set_weights(router, weights, z)
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
    for module, names in ((router, weights), (experts, EXPERTS)):
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
        config = ExpertChoiceConfig(
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

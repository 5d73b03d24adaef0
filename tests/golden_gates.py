"""Golden cases of today's routers: gates, their balance, seats, shared experts, and rules of capacity."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from moe.dense import MLP
from moe.experts import Experts
from moe.layer import MoEConfig, MoELayer
from moe.router_state import after_batch
from moe.routers import ReLUConfig, TopKConfig
from moe.routers.balance import BalanceConfig, QuantileConfig, SignConfig, frequency, frequency_loss
from moe.routers.choice import CapacityConfig
from moe.routers.relu import ReLURouter, openness_loss
from moe.routers.token_choice import chosen_by, top_experts, z_loss
from moe.routers.top_k import MAX_SCALE, TopKRouter, cosines, score
from moe.routing import GatherRouting, Router
from moe.rows import RowsRouting
from tests.golden_report import EXPERTS, Arrays, Meta, Report, experts_of


@dataclass(frozen=True, kw_only=True)
class FixedTopK(TopKConfig):
    """The files give a number of slots."""

    fixed: int

    def slots(self, *, num_tokens: int, num_experts: int) -> int:
        return self.fixed


def gate(z: Arrays, meta: Meta, report: Report) -> None:
    """The choice with a bias, the weights without it, and their gradient."""
    tokens, experts = z["logits"].shape
    report.close("logits", z["x"] @ z["W"], z["logits"])
    router, logits = _router(meta, experts, tokens, SignConfig()), z["logits"].clone().requires_grad_()
    router.bias_E.copy_(z["bias"])
    report.close("scores", score(logits, meta["config"]["score"]), z["scores"])
    routing = _routed(router, logits)
    assert routing.counts is not None
    report.exact("counts", torch.equal(routing.counts[0], z["counts"].long()))
    weights_TE = _dense(routing)
    report.close("weights", weights_TE, _scattered(z["ids"], z["weights"], experts))
    chosen = top_experts(score(logits, meta["config"]["score"]) + z["bias"], meta["config"]["k"])
    report.exact("ids", torch.equal(chosen, z["ids"].long()))
    (weights_TE * z["cotangent"]).sum().backward()
    report.gradient("grad_logits", logits.grad, z["grad_logits"])


def loss_free(z: Arrays, meta: Meta, report: Report) -> None:
    """A trajectory of the bias; a pass is one rank's microbatch."""
    c, experts, tokens = meta["config"], z["logits"].shape[-1], z["logits"].shape[-2]
    router = _router(meta, experts, tokens, SignConfig(rate=c["rate"], centre=c["centre"]))
    router.bias_E.copy_(z["bias"][0])
    counts, biases, violations = [], [router.bias_E.clone()], []
    kept = c["k"] > 1 or not c["normalise_k1"]
    for step, batch in enumerate(z["logits"].flatten(1, 2)):
        for i, logits in enumerate(batch):
            valid = z["valid"][step].flatten(0, 1)[i]
            routing = _routed(router, logits, valid)
            assert routing.counts is not None
            router.count(routing.counts)
            if kept:
                ids, weights = (z[name][step].flatten(0, 1)[i] for name in ("ids", "weights"))
                expected = _scattered(ids, weights, experts) * valid.unsqueeze(-1)
                report.close(f"weights {step}.{i}", _dense(routing), expected)
        assert router.counts is not None
        count = router.counts[0].clone()
        counts.append(count)
        violations.append(count.max() / count.double().mean() - 1)
        after_batch(router)
        biases.append(router.bias_E.clone())
    report.exact("counts", torch.equal(torch.stack(counts), z["counts"].long()))
    report.close("bias", torch.stack(biases), z["bias"])
    report.close("max_violation", torch.stack(violations), z["max_violation"])


@dataclass(frozen=True, kw_only=True)
class FineQuantile(QuantileConfig):
    """Bins that are as good as no bins, for scores of any size, and numpy's default rank for ``linear``."""

    linear: bool

    def _bins(self, bias_E: Tensor) -> tuple[Tensor, Tensor]:
        low = bias_E.new_tensor(-10.0)
        return low, -2 * low / self.bins

    def rank(self, tokens: Tensor, share: float) -> Tensor:
        return (tokens - 1) * share if self.linear else super().rank(tokens, share)


def quantile(z: Arrays, meta: Meta, report: Report) -> None:
    """Each step from the file's bias, up to the width of a bin."""
    c = meta["config"]
    config = FineQuantile(bins=1_000_000, ema=c["ema"], linear=c["quantile"] == "linear")
    for step, (logits_TE, valid_T) in enumerate(zip(z["logits"], z["valid"], strict=True)):
        scores = logits_TE if c["score"] == "identity" else score(logits_TE, c["score"])
        scores_GSE, valid_GS, bias_E = scores.unsqueeze(0), valid_T.unsqueeze(0), z["bias"][step]
        chosen = chosen_by(top_experts(scores_GSE + bias_E, c["k"]), valid_GS, len(bias_E))
        report.exact(f"counts {step}", torch.equal(chosen.sum((0, 1)), z["counts"][step].to(chosen)))
        counts = config.count(scores_GSE, bias_E, chosen, valid_GS)
        error = (config.next_bias(bias_E, counts, c["k"]) - z["bias"][step + 1]).abs().max().item()
        report.bound(f"bias {step}", error, 4e-5)


def log_sum_exp(z: Arrays, meta: Meta, report: Report) -> None:
    logits = z["logits"].clone().requires_grad_()
    loss_G = z_loss(logits.unsqueeze(0), z["valid"].unsqueeze(0))
    loss_G.sum().backward()
    report.close("loss", loss_G[0], z["loss"])
    report.gradient("grad_logits", logits.grad, z["grad_logits"])


def balanced(z: Arrays, meta: Meta, report: Report) -> None:
    """The loss by level. A group is an image; the global one is that of a pass which is the whole batch."""
    c = meta["config"]

    def loss(logits_GSE: Tensor, valid_GS: Tensor, level: str) -> Tensor:
        gates_GSE = score(logits_GSE, c["score"])
        chosen_GSE = chosen_by(top_experts(gates_GSE, c["k"]), valid_GS, gates_GSE.shape[-1])
        gates_GSE = gates_GSE / gates_GSE.sum(-1, keepdim=True)
        return frequency_loss(gates_GSE, frequency(chosen_GSE, level), valid_GS, level)

    def compare(name: str, loss: Tensor, logits: Tensor) -> None:
        report.close(f"loss_{name}", loss, z[f"loss_{name}"])
        report.gradient(f"grad_{name}", torch.autograd.grad(loss, logits)[0], z[f"grad_{name}"])

    logits, valid = z["logits"].clone().requires_grad_(), z["valid"]
    images, valid_images = logits.flatten(0, 2), valid.flatten(0, 2)
    per_image = loss(images, valid_images, "group")
    report.close("loss_per_image", per_image.view(valid.shape[:3]), z["loss_per_image"])
    compare("image", per_image.sum() / valid_images.amax(1).sum(), logits)
    passes = zip(logits.flatten(0, 1), valid.flatten(0, 1), strict=True)
    compare("microbatch", torch.stack([loss(*each, "pass")[0] for each in passes]).mean(), logits)
    compare("global", loss(images, valid_images, "pass")[0], logits)

    # What the next batch would use comes from the choice without a bias.
    experts, tokens = logits.shape[-1], logits.shape[-2]
    lagged = {"balance_weight": 1.0, "balance_level": "batch"}
    router = _router(meta, experts, tokens, SignConfig(), **lagged)
    router.bias_E.copy_(z["bias"])
    counts = router.forward(images.detach(), valid_images).counts
    assert counts is not None
    router.count(counts)
    after_batch(router)
    report.close("frequency_global", router.share_E, z["frequency_global"])


def cosine(z: Arrays, meta: Meta, report: Report) -> None:
    sim, log_scale = z["sim"].clone().requires_grad_(), z["log_scale"].clone().requires_grad_()
    report.close("log_scale_max", torch.tensor(MAX_SCALE).double().log(), z["log_scale_max"])
    x = z["x"] @ z["proj"].T + z["proj_bias"] if "proj" in z else z["x"]
    logits = cosines(x, sim, log_scale)
    report.close("logits", logits, z["logits"])
    (logits * z["cotangent"]).sum().backward()
    report.gradient("grad_sim", sim.grad, z["grad_sim"])
    report.gradient("grad_log_scale", log_scale.grad, z["grad_log_scale"])

    tokens, experts = logits.shape
    fields = {"cosine": True, "projection": len(z["proj"]) if "proj" in z else None}
    router = _router(meta, experts, tokens, dim=z["x"].shape[1], **fields)
    given = {"gate_DE": sim, "log_scale": log_scale.view(1)}
    if "proj" in z:
        given |= {"project_DP": z["proj"].T, "project_bias_P": z["proj_bias"]}
    router.load_state_dict({name: tensor.detach() for name, tensor in given.items()})
    routing = router.forward(z["x"].unsqueeze(0), torch.ones(1, tokens).double())
    report.close("weights", _dense(routing), _scattered(z["ids"], z["weights"], experts))


def relu(z: Arrays, meta: Meta, report: Report) -> None:
    """A trajectory of the coefficient over layers; every open gate has a seat."""
    c, (steps, layers, tokens, experts) = meta["config"], z["logits"].shape
    config = ReLUConfig(
        k=c["k"],
        coefficient=c["coefficient_init"],
        factor=c["multiplier"],
        capacity_factor=float(experts * tokens),
    )
    routers = nn.ModuleList(_of_logits(config, experts) for _ in range(layers))
    coefficients, sparsities = [], []
    for step in range(steps):
        coefficients.append(_coefficient(routers))
        counts = []
        for layer, router in enumerate(routers):
            assert isinstance(router, Router)
            routing = _routed(router, z["logits"][step, layer], z["valid"][step])
            assert routing.counts is not None
            valid = z["valid"][step].unsqueeze(-1)
            where = f"{step}.{layer}"
            report.close(f"gates {where}", _dense(routing), z["gates"][step, layer] * valid)
            report.close(f"loss {where}", routing.aux_G[0], z["weighted_loss"][step, layer])
            router.count(routing.counts)
            counts.append(routing.counts)
        shut, gates = torch.stack(counts).sum(0).double()
        sparsities.append(shut / gates)
        after_batch(routers)
    report.close("sparsity", torch.stack(sparsities), z["sparsity"])
    for i, coefficient in enumerate([*coefficients, _coefficient(routers)]):
        report.close(f"coefficient {i}", coefficient, z["coefficient"][i])
    logits = z["logits"][0, 0].clone().requires_grad_()
    openness_loss(logits.relu().unsqueeze(0), z["valid"][:1], c["k"]).sum().backward()
    report.gradient("grad_logits", logits.grad, z["grad_logits_first"])


def _coefficient(routers: nn.ModuleList) -> Tensor:
    found = {router.coefficient.item() for router in routers if isinstance(router, ReLURouter)}
    assert len(found) == 1
    return torch.tensor(found.pop(), dtype=torch.float64)


def seats(z: Arrays, meta: Meta, report: Report) -> None:
    """Which choices find a seat, the output, and the gradients of weights and experts."""
    c, experts = meta["config"], z["logits"].shape[1]
    priority = "weight" if c["seats"] == "weight" else "max"
    config = FixedTopK(**_fields(meta), fixed=c["capacity"], priority=priority)
    routing = _routed(_of_logits(config, experts), z["logits"].clone().requires_grad_(), z["valid"])
    kept = _scattered(z["ids"], z["keep"].double(), experts)
    report.exact("keep", torch.equal(_dense(routing) > 0, kept > 0))
    routing.weight_GEC.retain_grad()
    mlps = experts_of(z)
    y = routing.combine(mlps(routing.dispatch(z["x"].unsqueeze(0))))[0]
    report.close("y", y, z["y"])
    (y * z["cotangent"]).sum().backward()
    _gradients(z, mlps, report)
    assert routing.weight_GEC.grad is not None
    gradient = _dense(routing, routing.weight_GEC.grad).gather(1, z["ids"].long()) * z["keep"]
    report.gradient("grad_weights", gradient, z["grad_weights"] * z["keep"])


def dropless(z: Arrays, meta: Meta, report: Report) -> None:
    """The order of the rows, the output, and the gradients of weights and experts; counts are not padded."""
    c, experts = meta["config"], z["logits"].shape[1]
    router = _of_logits(TopKConfig(**_fields(meta), capacity_factor="dropless"), experts)
    routing = router(z["logits"].unsqueeze(0), z["valid"].unsqueeze(0))
    assert isinstance(routing, RowsRouting)
    assert routing.count_E is not None
    for name, found in {
        "ids": routing.expert_GSK[0],
        "counts": routing.count_E,
        "ends": routing.count_E.cumsum(0),
        "order_token": routing.order_M // c["k"],
        "order_choice": routing.order_M % c["k"],
    }.items():
        report.exact(name, torch.equal(found, z[name].long()))
    report.close("weights", routing.weight_GSK[0], z["weights"])
    mlps, weight_GSK = experts_of(z), routing.weight_GSK.detach().requires_grad_()
    rows = mlps(routing.dispatch(z["x"].unsqueeze(0)), None, routing.count_E)
    y = replace(routing, weight_GSK=weight_GSK).combine(rows)[0]
    report.close("y", y, z["y"])
    (y * z["cotangent"]).sum().backward()
    _gradients(z, mlps, report)
    assert weight_GSK.grad is not None
    report.gradient("grad_weights", weight_GSK.grad[0], z["grad_weights"])


def shared(z: Arrays, meta: Meta, report: Report) -> None:
    """A layer whose images are tokens, all in one group."""
    tokens, experts = z["logits"].shape
    config = MoEConfig(
        num_experts=experts,
        images_per_group=tokens,
        router=TopKConfig(**_fields(meta), capacity_factor=float(experts * tokens), priority="none"),
        expert_dim=z["W1"].shape[2],
        shared_dim=z["shared_W1"].shape[1],
    )
    layer = MoELayer(config, dim=z["x"].shape[1], hidden=1).double()
    object.__setattr__(layer.router, "logits", lambda *_: z["logits"].unsqueeze(0))
    layer.experts = experts_of(z)
    assert isinstance(layer.shared, MLP)
    for part, number in (("up", "1"), ("down", "2")):
        linear = getattr(layer.shared, part)
        linear.weight.data.copy_(z[f"shared_W{number}"].T)
        linear.bias.data.copy_(z[f"shared_b{number}"])
    y = layer(z["x"].unsqueeze(1), z["valid"])
    valid = z["valid"].unsqueeze(1)
    report.close("y", y[:, 0] * valid, z["y"])
    report.close("routed", y[:, 0] * valid - layer.shared(z["x"]) * valid, z["routed"])
    (y[:, 0] * valid * z["cotangent"]).sum().backward()
    _gradients(z, layer.experts, report)


def capacities(z: Arrays, meta: Meta, report: Report) -> None:
    """The rules that are a capacity's rounding here."""
    for row in meta["config"]["rows"]:
        if (rule := row["rule"]) in ("round", "megatron"):
            config = TopKConfig(
                k=row["k"],
                capacity_factor=row["cf"],
                capacity_rounding="round" if rule == "round" else "ceil",
                capacity_multiple_of=row["multiple"] or 1,
            )
            slots = CapacityConfig.capacity(config, row["T"] * row["k"], row["E"])
            report.exact(f"{rule} {row['T']} {row['E']} {row['k']} {row['cf']}", slots == row["C"])


def _fields(meta: Meta) -> dict:
    c = meta["config"]
    return {name: c[name] for name in ("k", "score", "normalise", "scale")}


def _router(
    meta: Meta,
    experts: int,
    tokens: int,
    balance: BalanceConfig | None = None,
    *,
    dim: int = 0,
    **fields: object,
) -> TopKRouter:
    """A router with a seat for every choice, whose logits are its tokens unless they have another width."""
    if balance:
        fields["balance"] = balance
    config = TopKConfig(**_fields(meta), capacity_factor=float(experts * tokens), priority="none", **fields)  # pyright: ignore[reportArgumentType]
    router = _of_logits(config, experts, dim)
    assert isinstance(router, TopKRouter)
    return router


def _of_logits(config: CapacityConfig, experts: int, dim: int = 0) -> Router:
    """A router in float64 with the identity for its gate."""
    router = config.build(dim=dim or experts, num_experts=experts).double()
    for name, buffer in router.named_buffers():
        buffer.fill_(router.draws()[name].scale)
    if not dim:
        nn.init.eye_(router.get_parameter("gate_DE"))
    return router


def _routed(router: Router, logits: Tensor, valid: Tensor | None = None) -> GatherRouting:
    valid = torch.ones(len(logits)).double() if valid is None else valid
    if router.get_parameter("gate_DE").shape[0] != logits.shape[1]:
        raise AssertionError("the gate is no identity")
    routing = router(logits.unsqueeze(0), valid.unsqueeze(0))
    assert isinstance(routing, GatherRouting)
    return routing


def _dense(routing: GatherRouting, values_GEC: Tensor | None = None) -> Tensor:
    """The weights of the seats by token and expert, (T, E), of the only group."""
    values_GEC = routing.weight_GEC if values_GEC is None else values_GEC
    _, tokens, experts = routing.gates_GSE.shape
    places = values_GEC.new_zeros(experts, tokens + 1)
    return places.scatter_add(1, routing.token_GEC[0], values_GEC[0])[:, :tokens].T


def _scattered(ids: Tensor, values: Tensor, experts: int) -> Tensor:
    return values.new_zeros(len(ids), experts).scatter(1, ids.long(), values)


def _gradients(z: Arrays, experts: Experts, report: Report) -> None:
    for ours, theirs in EXPERTS.items():
        gradient = experts.get_parameter(ours).grad
        assert gradient is not None
        if theirs[0] == "b":
            report.gradient(f"grad_{theirs}", gradient, z[f"grad_{theirs}"])
        else:
            report.gradient(f"grad_{theirs}_sum", gradient.sum((1, 2)), z[f"grad_{theirs}_sum"])

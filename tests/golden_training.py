"""Golden cases of averages of weights, rates by layer, DeiT's schedule, greedy soups and upcycled experts."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from moe.layer import MoEConfig
from moe.models.vit import ViTConfig
from moe.presets import PRESETS
from moe.routers import ExpertChoiceConfig, RouterConfig, SoftConfig, TokenChoiceConfig
from orchestrator.checkpoint.files import EMA
from orchestrator.config import EMAConfig
from orchestrator.evaluation.soup import greedy
from orchestrator.optimizers import SGDConfig
from orchestrator.schedules import DeitConfig
from orchestrator.training.average import Average
from tests.golden_report import EXPERTS, Arrays, Meta, Report
from tests.moe.parts import build_layer


def ema(z: Arrays, meta: Meta, report: Report) -> None:
    """Without gamma in the file, its average has no warm-up."""
    fields = {name: meta[name] for name in ("decay", "gamma", "power", "start") if name in meta}
    config = EMAConfig(**{"power": None, **fields})
    layer = nn.Module()
    layer.weight = nn.Parameter(z["values"][0].clone())
    optimizer = SGDConfig().build(layer)  # at its rate of 0
    Average(config, optimizer)
    found, decays = [], []
    for update, value in enumerate(z["values"], start=1):
        with torch.no_grad():
            layer.weight.copy_(value)
        layer.weight.grad = torch.zeros_like(value)
        optimizer.step()
        found.append(optimizer.state[layer.weight][EMA].clone())
        decays.append(config.decay_at(update))
    report.close("decays", torch.tensor(decays, dtype=torch.float64), z["decays"], 1e-14)
    report.close("averages", torch.stack(found), z["averages"], 1e-14)


def layer_rates(z: Arrays, meta: Meta, report: Report) -> None:
    """The norm behind the blocks is with the last block; else the two rules of the file are one."""
    config = replace(
        PRESETS["debug"],
        depth=meta["depth"],
        moe=MoEConfig(layers=f"last_{meta['depth']}", router=SoftConfig()),
    )
    rates = dict[str, float]()
    for fields in ({"pooling": "token"}, {"pooling": "map", "representation_size": 8}):
        rates |= _rates(replace(config, **fields), meta["decay"])
    found = torch.tensor([rates[name] for name in meta["names"]], dtype=torch.float64)
    report.close("with_last_block", found, z["with_last_block"], 1e-14)
    others = [i for i, name in enumerate(meta["names"]) if not name.startswith("norm.")]
    report.close("with_head", found[others], z["with_head"][others], 1e-14)


def _rates(config: ViTConfig, decay: float) -> dict[str, float]:
    with torch.device("meta"):
        model = config.build(seed=None)
    groups = SGDConfig(layer_decay=decay).build(model).param_groups
    scale_of = {param: group["lr_scale"] for group in groups for param in group["params"]}
    return {name: scale_of[param] for name, param in model.named_parameters()}


def deit3_schedule(z: Arrays, meta: Meta, report: Report) -> None:
    """At the first and the last step of each epoch. A rate that is not late is that of the next epoch."""
    size = 5
    config = DeitConfig(
        warmup_steps=meta["warmup"] * size, epoch_steps=size, start=meta["start"], end=meta["low"]
    )
    for name, later in (("rate_one_epoch_late", 0), ("rate", 1)):
        for step in (0, size - 1):
            steps = [(epoch + later) * size + step for epoch in z["epoch"].tolist()]
            rates = [config.rate(each, peak=meta["peak"], total=meta["epochs"] * size) for each in steps]
            report.close(f"{name}, step {step}", torch.tensor(rates, dtype=torch.float64), z[name], 1e-12)


def soup(z: Arrays, meta: Meta, report: Report) -> None:
    classes = z["models"].shape[1] // z["features"].shape[1]

    def accuracy_of(members: Sequence[int]) -> float:
        weights = z["models"][list(members)].mean(0).view(-1, classes)
        return ((z["features"] @ weights).argmax(1) == z["labels"]).double().mean().item()

    everything = range(len(z["models"]))
    for ties, expected in ((not meta["strict"], "ingredients"), (meta["strict"], "ingredients_other_rule")):
        report.exact(expected, greedy(everything, accuracy_of, ties=ties) == meta[expected])
    members = greedy(everything, accuracy_of, ties=not meta["strict"])
    report.close("soup", z["models"][members].mean(0), z["soup"], 1e-14)
    report.exact("accuracy", accuracy_of(members) == meta["accuracy"])


def upcycle(z: Arrays, meta: Meta, report: Report) -> None:
    """A softmax over the chosen experts is one over all, normalised. Where it is, and an expert took the
    token, the output is the dense model's.
    """
    experts, tokens = meta["experts"], len(z["x"])
    room = {"capacity_factor": float(experts), "noise_std": 0.0}
    routers: dict[str, RouterConfig] = {
        f"token_choice_k{k}_{name}": TokenChoiceConfig(k=k, topk=topk, **room)
        for k in (1, 2)
        for name, topk in (("normalised", "before"), ("raw", "after"))
    }
    c = meta["expert_choice_capacity"] * experts / tokens
    routers |= {
        f"expert_choice_c1_{name}": ExpertChoiceConfig(capacity_factor=c, normalize=name == "normalised")
        for name in ("normalised", "raw")
    }
    assert set(routers) == set(meta["gaps"])
    for name, config in routers.items():
        dim, hidden = z["p/W1"].shape
        layer = build_layer(config, dim=dim, hidden=hidden, num_experts=experts).double()
        with torch.no_grad():
            layer.router.gate_DE.copy_(z["p/router"])
            for ours, theirs in EXPERTS.items():  # copies of one MLP
                layer.experts.get_parameter(ours).copy_(z[f"p/{theirs}"])
            y, routing = layer(z["x"][None])
        report.close(f"y/{name}", y[0], z[f"y/{name}"])
        report.close(f"combine/{name}", _combine(routing, experts, tokens), z[f"combine/{name}"])
        if name.endswith("normalised"):
            took = z[f"combine/{name}"].sum(1) > 0
            report.close(f"dense/{name}", y[0][took], z["y_dense"][took], 1e-6)


def _combine(routing, experts: int, tokens: int) -> Tensor:
    """The weight of each expert for each token: what comes back if an expert answers with its own number."""
    rows = routing.dispatch(torch.zeros(1, tokens, 1, dtype=torch.float64)).shape[1]
    answers = torch.eye(experts, dtype=torch.float64)[:, None].expand(-1, rows, -1)
    return routing.combine(answers)[0]

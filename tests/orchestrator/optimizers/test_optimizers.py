"""Schedules and updates against closed forms, and which weights decay. `tests.golden` has the reference's."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from moe.config import members
from moe.experts import is_expert
from moe.layer import MoEConfig
from moe.models.vit import ViT
from moe.parallel import build_whole, update
from moe.presets import PRESETS, VITS
from moe.routers import MixtureConfig, RouterConfig, SoftConfig
from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.optimizers import AdafactorConfig, AdamWConfig, LambConfig, OptimizerConfig, SGDConfig
from orchestrator.optimizers.adafactor import Adafactor
from orchestrator.optimizers.adamw import AdamW
from orchestrator.optimizers.base import RatesConfig
from orchestrator.schedules import CosineConfig, DeitConfig, LinearConfig, RsqrtConfig, ScheduleConfig
from orchestrator.training.loop import train_step
from tests.orchestrator.training.test_loop import random_batch


def rates(schedule: ScheduleConfig, *, total: int, peak: float = 1.0) -> list[float]:
    return [schedule.rate(step, peak=peak, total=total) for step in range(total)]


def test_cosine_and_linear_have_closed_forms() -> None:
    cosine = rates(CosineConfig(warmup_steps=20, end_frac=0.1), total=120, peak=2.0)
    linear = rates(LinearConfig(warmup_steps=20, end_frac=0.1), total=120, peak=2.0)
    for step in range(20):
        assert cosine[step] == linear[step] == pytest.approx(2.0 * step / 20)
    for step in range(20, 120):
        done = (step - 20) / 100
        assert cosine[step] == pytest.approx(0.2 + 1.8 * 0.5 * (1 + math.cos(math.pi * done)))
        assert linear[step] == pytest.approx(0.2 + 1.8 * (1 - done))


@pytest.mark.parametrize(
    "schedule",
    [
        RsqrtConfig(warmup_steps=200, cooldown_steps=300, timescale=50),
        RsqrtConfig(warmup_steps=0, cooldown_steps=0),
        RsqrtConfig(warmup_steps=1000, cooldown_steps=0),
        RsqrtConfig(warmup_steps=0, cooldown_steps=1000),
        RsqrtConfig(),
        CosineConfig(),
        LinearConfig(warmup_steps=0),
    ],
)
def test_no_jumps_but_the_start(schedule: ScheduleConfig) -> None:
    """No phase begins elsewhere than the one before it ends; a step of warm-up is the steepest."""
    values = rates(schedule, total=1000)
    warmup, cooldown = schedule.phases(1000)
    steepest = 1 / min(n for n in (warmup, cooldown, 90) if n)
    assert np.abs(np.diff(values)).max() <= steepest
    assert values[0] == (0.0 if warmup else 1.0)
    assert max(values) <= 1
    assert min(values) >= 0


def test_a_run_goes_on_at_the_rate_of_another() -> None:
    """At its steps after the warm-up, without a jump, to its own cooldown."""
    fields = {"cooldown_steps": 30, "timescale": 50}
    whole = rates(RsqrtConfig(warmup_steps=20, **fields), total=300)
    after = rates(RsqrtConfig(begin=80, **fields), total=200)
    assert after == pytest.approx(whole[100:])
    with pytest.raises(ValueError, match=r"begin=80 goes on .* which warmup_steps=5 would reach again"):
        RsqrtConfig(begin=80, warmup_steps=5)


def test_the_schedule_of_deit() -> None:
    """An epoch has one rate. Whole runs of less than an epoch, or without warm-up, have rates too."""
    found = rates(DeitConfig(epoch_steps=10, warmup_steps=20, start=0.1, end=0.01), total=105)
    assert [len({*found[epoch : epoch + 10]}) for epoch in range(0, 100, 10)] == [1] * 10
    assert found[:30:10] == pytest.approx([0.1, 0.1, 0.55])
    assert found[30] == pytest.approx(0.01 + 0.99 * (1 + math.cos(0.2 * math.pi)) / 2)
    assert rates(DeitConfig(epoch_steps=10), total=5) == [1.0] * 5
    assert rates(DeitConfig(epoch_steps=10, warmup_steps=0), total=100)[:20] == [1.0] * 20


def test_no_phases_given() -> None:
    assert (RsqrtConfig().phases(200), CosineConfig().phases(200)) == ((20, 40), (20, 0))
    assert rates(RsqrtConfig(timescale=100), total=200)[159] == pytest.approx(1 / math.sqrt(1 + 139 / 100))
    assert rates(RsqrtConfig(timescale=100), total=200)[180] == pytest.approx(0.5 / math.sqrt(1 + 140 / 100))


def test_sgd_has_a_closed_form() -> None:
    """Two updates with momentum; decay is part of the gradient, as in torch."""
    layer = nn.Linear(2, 1)
    start = layer.weight.detach().clone()
    optimizer = SGDConfig(momentum=0.5, weight_decay=0.1).build(layer)
    first, second = torch.tensor([[1.0, 2.0]]), torch.tensor([[-3.0, 1.0]])
    for grad in (first, second):
        layer.weight.grad, layer.bias.grad = grad.clone(), torch.ones(1)
        for group in optimizer.param_groups:
            group["lr"] = 0.2
        optimizer.step()
    one = start - 0.2 * (first + 0.1 * start)
    two = one - 0.2 * (0.5 * (first + 0.1 * start) + second + 0.1 * one)
    torch.testing.assert_close(layer.weight.detach(), two)


class Operators(TorchDispatchMode):
    """Counts operators that compute or copy; one on a list of tensors counts once."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        idle = any(word in func.__name__ for word in ("empty", "detach", "view", "_local_scalar_dense"))
        self.count += not (func.is_view or idle)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("config", "operators"),
    [
        (AdamWConfig(), 14),
        (AdamWConfig(state_dtype="bfloat16"), 18),
        (SGDConfig(), 15),
        (AdafactorConfig(), 58),
        (LambConfig(), 43),
    ],
    ids=["adamw", "adamw bfloat16", "sgd", "adafactor", "lamb"],
)
def test_an_update_takes_few_operators(config: OptimizerConfig, operators: int) -> None:
    """A thin S/16, with as many parameters and shapes: `docs/gpu.md` has these numbers. An update clips, and
    rounds copies of the weights.
    """
    thin = replace(VITS["S/16"], width=96, mlp_dim=384, heads=3)
    model = build_whole(thin, torch.device("cpu"), seed=None, compute_dtype=torch.bfloat16)
    optimizer, params = config.build(model), list(model.parameters())
    assert len(params) == 175
    for group in optimizer.param_groups:
        group["foreach"] = True  # as torch chooses on a GPU
    for param in params:
        param.grad = torch.ones_like(param)
    update(model, optimizer, 1.0)  # makes the state
    with Operators() as counted:
        update(model, optimizer, 1.0)
    assert counted.count <= operators


DECAYS = {  # the last two parts of every name in a ViT whose weights decay
    "embed.weight",
    "conv0.weight",
    "project.weight",
    "qkv.weight",
    "out.weight",
    "up.weight",
    "down.weight",
    "experts.w_in_EDF",
    "experts.w_out_EFD",
    "router.gate_DE",
    "router.gate_clusters",
}
SOFT_ROUTING = {"router.phi_DEC", "router.scale"}
ROUTERS_AND_VARIANTS = [
    *(kind() for kind in members(RouterConfig)),
    SoftConfig(normalize="none"),
    MixtureConfig(level="hierarchical"),
]


each_optimizer = pytest.mark.parametrize("optimizer", members(OptimizerConfig))


@each_optimizer
def test_an_update_at_rate_zero_makes_the_state_and_moves_nothing(optimizer: type[OptimizerConfig]) -> None:
    """As a checkpoint needs, and the state has as many bytes as the config says."""
    model = ViT(replace(PRESETS["debug"], moe=MoEConfig()))
    config = optimizer(weight_decay=0.1)
    built, before = config.build(model), [param.clone() for param in model.parameters()]
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    for group in built.param_groups:
        group["lr"] = 0.0
    built.step()
    assert all(map(torch.equal, model.parameters(), before))
    held = [value for state in built.state.values() for name, value in state.items() if name != "step"]
    assert sum(value.nbytes for value in held if value is not None) == sum(
        config.state_bytes(param.shape, param.shape, expert=is_expert(name))
        for name, param in model.named_parameters()
    )


@each_optimizer
def test_a_layer_below_has_a_smaller_rate(optimizer: type[OptimizerConfig]) -> None:
    """A step with rates by layer moves each parameter as a step with its layer's rate; what decays is the
    same. The golden cases have the layers of all parameters.
    """
    run = override(RunConfig(), {"model.moe.router.kind": "soft", "train.schedule.warmup_steps": 0})
    config, decays = optimizer(layer_decay=0.5), {}

    def moved(config: OptimizerConfig, rate: float) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = ViT(run.model)
        before = {name: param.detach().clone() for name, param in model.named_parameters()}
        built = config.build(model)
        train = replace(run.train, lr=rate, optimizer=config, clip_norm=None)
        train_step(model, built, random_batch(8), replace(run, train=train), step=0)
        decays[rate, config.layer_decay] = {
            name: next(g["weight_decay"] for g in built.param_groups if any(p is param for p in g["params"]))
            for name, param in model.named_parameters()
        }
        return {name: param.detach() - before[name] for name, param in model.named_parameters()}

    found = moved(config, 0.1)
    layers = ViT(run.model).layers_above()
    assert {*layers.values()} == {0, 1, 2, 3}
    assert (layers["norm.weight"], layers["head.weight"], layers["position_SD"]) == (1, 0, 3)
    assert layers["blocks.1.mlp.router.phi_DEC"] == layers["blocks.1.mlp.experts.w_in_EDF"] == 1
    for n in range(4):
        plain = moved(replace(config, layer_decay=None), 0.1 * 0.5**n)
        for name in layers:
            if layers[name] == n:
                torch.testing.assert_close(found[name], plain[name], rtol=1e-4, atol=1e-7)
    assert all(each == decays[0.1, 0.5] for each in decays.values())


@each_optimizer
def test_parts_have_rates_of_their_own(optimizer: type[OptimizerConfig]) -> None:
    """A step moves each part as a step with its rate, and times that of its layer."""
    run = override(RunConfig(), {"train.schedule.warmup_steps": 0, "model.moe.shared_dim": 16})
    rates = {"router": 2.0, "experts": 0.5, "head": 0.25, "backbone": 0.75}

    def moved(config: OptimizerConfig, rate: float) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = ViT(run.model)
        before = {name: param.detach().clone() for name, param in model.named_parameters()}
        train = replace(run.train, lr=rate, optimizer=config, clip_norm=None)
        train_step(model, config.build(model), random_batch(8), replace(run, train=train), step=0)
        return {name: param.detach() - before[name] for name, param in model.named_parameters()}

    found = moved(optimizer(rates=RatesConfig(**rates)), 0.1)
    layered = moved(optimizer(rates=RatesConfig(**rates), layer_decay=0.5), 0.1)
    parts = {name: next((p for p in rates if f".{p}." in f".{name}"), "backbone") for name in found}
    assert {*parts.values()} == {*rates}
    assert parts["blocks.1.mlp.shared.up.weight"] == "backbone"
    for part, factor in rates.items():
        plain = moved(optimizer(), 0.1 * factor)
        plain_layered = moved(optimizer(layer_decay=0.5), 0.1 * factor)
        for name in parts:
            if parts[name] == part:
                torch.testing.assert_close(found[name], plain[name], rtol=1e-4, atol=1e-7)
                torch.testing.assert_close(layered[name], plain_layered[name], rtol=1e-4, atol=1e-7)


@each_optimizer
@pytest.mark.parametrize("router", [None, *ROUTERS_AND_VARIANTS])
def test_only_matmul_weights_decay(router: RouterConfig | None, optimizer: type) -> None:
    moe = MoEConfig(router=router) if router else None
    model = ViT(replace(PRESETS["debug"], moe=moe, stem=None if moe else "conv", layer_scale=1e-4))
    built = optimizer(weight_decay=0.25, weight_decay_head=3.0).build(model)
    decay_of = {id(p): group["weight_decay"] for group in built.param_groups for p in group["params"]}
    assert len(decay_of) == len(list(model.parameters()))
    seen = set()
    for name, param in model.named_parameters():
        ends = ".".join(name.split(".")[-2:])
        seen.add(ends)
        assert "router" not in name or ends in DECAYS | SOFT_ROUTING, f"does {name} decay?"
        expected = 3.0 if ends == "head.weight" else 0.25 if ends in DECAYS else 0.0
        assert decay_of[id(param)] == expected, name
    assert {"position_SD", "norm1.bias", "norm_q.weight", "norm.weight", "head.bias", "qkv.weight"} <= seen
    assert "0.scale1_D" in seen


def test_the_scale_of_soft_routing_and_all_parameters_may_decay() -> None:
    model = ViT(replace(PRESETS["debug"], moe=MoEConfig(router=SoftConfig())))

    def decays(**fields: Any) -> dict[str, float]:
        groups = AdamWConfig(weight_decay=0.1, **fields).build(model).param_groups
        decay_of = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
        return {name: decay_of[id(p)] for name, p in model.named_parameters()}

    released = decays(weight_decay_head=3.0, weight_decay_scale=0.03)
    assert released["head.weight"] == 3.0
    assert (released["blocks.1.mlp.router.scale"], released["blocks.1.mlp.router.phi_DEC"]) == (0.03, 0.0)
    assert set(decays(decays="all").values()) == {0.1}
    assert decays()["head.weight"] == 0.1, "as other kernels"


def test_a_matrix_of_a_new_router_decays() -> None:
    """Unknown matrices decay, unknown vectors do not."""
    router = nn.Module()
    router.projection_DQ, router.offset_Q = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(2))
    built = AdamWConfig(weight_decay=0.25).build(router)
    decays = [(group["weight_decay"], group["params"]) for group in built.param_groups]
    assert decays == [(0.25, [router.projection_DQ]), (0.0, [router.offset_Q])]


def test_the_config_reaches_torch() -> None:
    adam = AdamWConfig(beta1=0.8, beta2=0.95).build(nn.Linear(2, 2))
    assert isinstance(adam, torch.optim.AdamW)
    assert {group["betas"] for group in adam.param_groups} == {(0.8, 0.95)}
    rounded = AdamWConfig(beta1=0.8, state_dtype="bfloat16").build(nn.Linear(2, 2))
    assert isinstance(rounded, AdamW)
    assert rounded.moment_dtype == torch.bfloat16
    assert {group["betas"] for group in rounded.param_groups} == {(0.8, 0.999)}
    sgd = SGDConfig(momentum=0.7).build(nn.Linear(2, 2))
    assert isinstance(sgd, torch.optim.SGD)
    assert {group["momentum"] for group in sgd.param_groups} == {0.7}
    model = ViT(replace(PRESETS["debug"], moe=MoEConfig()))
    adafactor = AdafactorConfig(beta1=0.8, beta2_cap=0.95, min_dim_to_factor=8).build(model)
    assert isinstance(adafactor, Adafactor)
    assert (adafactor.beta1, adafactor.beta2_cap) == (0.8, 0.95)
    experts = model.blocks[1].mlp.experts
    dims = [adafactor.dims[p] for p in (experts.w_in_EDF, experts.b_in_EF, model.head.weight)]
    assert dims == [(1, 2), None, (0, 1)]

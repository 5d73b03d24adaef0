"""The state of routers: when it changes, what is counted, and that the split of a batch does not matter.

Workers are compared in `test_parallel`, whose cases have routers with state.
"""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from moe.init import Draw, constant, init_weights, mix, normal, set_unsaved
from moe.layout import ParallelConfig
from moe.overrides import RoutingOverrides
from moe.parallel import build_whole
from moe.router_state import after_batch, before_step
from moe.routers import MixtureConfig, ReLUConfig, TopKConfig
from moe.routers.balance import QuantileConfig, SignConfig
from tests.lanes import mostly_smoke
from tests.moe.parts import images, vit_config

E, B = 4, 8
ROUTERS = {
    "sign": TopKConfig(k=2, score="sigmoid", balance=SignConfig(rate=0.1)),
    "quantile": TopKConfig(k=2, score="sigmoid", balance=QuantileConfig(ema=0.2)),
    "lagged": TopKConfig(k=2, balance_weight=0.1, balance_level="batch", balance=SignConfig(rate=0.1)),
    "dropless": TopKConfig(k=2, score="sigmoid", capacity_factor="dropless", balance=SignConfig(rate=0.1)),
    "relu": ReLUConfig(k=2, coefficient=1e-3),
    "mixture": MixtureConfig(temperature=2.0, temperature_decay=0.9),
}
each_router = pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS)


def build(router, **options: bool):
    """Both blocks have experts."""
    config = vit_config(router, layers=(0, 1))
    return build_whole(config, torch.device("cpu"), seed=0, options=ParallelConfig(**options)).double()


def step(model, number: int, *, parts: int = 1, rate: float = 1e-2) -> Tensor:
    """A step of gradient descent; returns the first logit."""
    before_step(model, number)
    x = images(B, seed=number).double()
    for part, keys in zip(x.chunk(parts), mix(torch.arange(B), number).chunk(parts), strict=True):
        output = model(part, keys_B=keys)
        (output.logits.square().sum() / B + output.aux * len(part) / B).backward()
    after_batch(model)
    with torch.no_grad():
        for param in model.parameters():
            if param.grad is not None:
                param -= rate * param.grad
            param.grad = None
    return output.logits.detach()[-1, 0]


def state(model) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, buffer in expected.items():
        assert torch.equal(got[name], buffer), name


@each_router
def test_state_is_the_same_to_the_bit_for_any_microbatch_and_with_evaluation_between(router):
    """Evaluation, overrides in training, passes without gradients and a resumption change nothing."""
    plain, others = build(router), [build(router) for _ in range(2)]
    start = state(plain)
    for number in range(5):
        step(plain, number)
        for other, parts in zip(others, (2, 4), strict=True):
            step(other, number, parts=parts)
            other.eval()
            other(images(3).double())
            other.train()
            with torch.no_grad():
                other(images(3).double())
            other(images(3).double(), routing_overrides=RoutingOverrides(experts=2))
            if number == 1:
                resumed = build(router)
                resumed.load_state_dict(other.state_dict())
                others[parts // 4] = resumed
        for other in others:
            assert_same(state(other), state(plain))
    changed = [name for name, buffer in state(plain).items() if not torch.equal(buffer, start[name])]
    saved = [name for name in plain.state_dict() if name in start]
    assert changed == saved
    assert len(saved) >= 2


@each_router
@pytest.mark.parametrize(
    "option", mostly_smoke(["activation_checkpointing", "compile"], fast=["activation_checkpointing"])
)
def test_recomputation_and_compilation_count_once(monkeypatch, router, option):
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **rest: compiler(f, **rest | {"backend": "eager"}))
    plain, other = build(router), build(router, **{option: True})
    for number in range(3):
        torch.testing.assert_close(step(plain, number), step(other, number))
    assert_same(state(other), state(plain))


@each_router
def test_padding_does_not_count(router):
    """Whole images of padding, in groups of two."""
    models = [build(router) for _ in range(2)]
    x = images(6).double()
    for model, (batch, valid) in zip(
        models, [(x[:4], None), (x, torch.tensor([1.0, 1, 1, 1, 0, 0]).double())], strict=True
    ):
        before_step(model, 0)
        model(batch, valid)
        after_batch(model)
    assert_same(state(models[1]), state(models[0]))


@each_router
def test_a_frozen_router_keeps_its_state(router):
    model = build(router)
    model.freeze("blocks.1.mlp.router")
    before = state(model)
    for number in range(3):
        step(model, number)
    changed = {name for name, buffer in state(model).items() if not torch.equal(buffer, before[name])}
    assert {name.split(".")[1] for name in changed} == {"0"}


@each_router
def test_state_stays_exact_in_a_bfloat16_model(router):
    """And is saved and copied as it is; what was counted is not saved."""
    model = build(router).float()
    for number in range(3):
        before_step(model, number)
        model(images(B, seed=number))
        after_batch(model)
    before, rounded = state(model), deepcopy(model).to(torch.bfloat16)
    assert_same(state(rounded), before)
    assert all(parameter.dtype == torch.bfloat16 for parameter in rounded.parameters())
    assert not [name for name in model.state_dict() if name.endswith("counts")]


def test_one_coefficient_for_all_layers():
    """By hand: of two layers' gates, one has all open and the other none, k = 1 of 4."""
    model = build(ReLUConfig(coefficient=1.0, factor=2.0))
    routers = [block.mlp.router for block in model.blocks]
    for shut, expected in ((3, 2.0), (4, 1.0)):  # 3 of 4 shut is the aim, at which it shrinks
        for router, counts in zip(routers, ([0, 4], [shut + 2, 4]), strict=True):
            router.count(torch.tensor(counts))
        after_batch(model)
        assert [router.coefficient.item() for router in routers] == [expected] * 2
    after_batch(model)  # nothing was counted
    assert [router.coefficient.item() for router in routers] == [1.0] * 2


def test_sign_by_hand():
    """The mean of 3, 1, 0, 4 is 2; the changes are -, +, +, -, whose mean is 0, and with 2 in the middle it
    is not."""
    bias_E = torch.tensor([0.5, 0.0, 0.0, 0.0])
    counts = torch.tensor([[3, 1, 0, 4]])
    config = SignConfig(rate=0.1)
    torch.testing.assert_close(config.next_bias(bias_E, counts, 1), torch.tensor([0.4, 0.1, 0.1, -0.1]))
    counts = torch.tensor([[4, 2, 2, 0]])
    unmoved = replace(config, centre=False).next_bias(bias_E, counts, 1)
    torch.testing.assert_close(unmoved, torch.tensor([0.4, 0.0, 0.0, 0.1]))
    counts = torch.tensor([[5, 1, 1, 1]])
    centred = config.next_bias(bias_E, counts, 1) - bias_E
    torch.testing.assert_close(centred, torch.tensor([-0.15, 0.05, 0.05, 0.05]))


@pytest.mark.parametrize("k", [1, 2])
def test_quantile_balances_the_batch_that_it_saw(k):
    """Half of all tokens go to one expert before; with the next bias all loads are within a few percent."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(1, 4000, E, generator=generator).add(torch.tensor([2.0, 0.0, -1.0, 0.0])).sigmoid()
    config, valid, bias_E = QuantileConfig(), torch.ones(1, 4000), torch.zeros(E)

    def chosen(bias_E: Tensor) -> Tensor:
        best = (scores + bias_E).topk(k).indices
        return torch.zeros_like(scores).scatter(-1, best, 1.0)

    assert chosen(bias_E).sum((0, 1)).max() > 1.6 * k * 1000
    for _ in range(6):
        counts = config.count(scores, bias_E, chosen(bias_E), valid)
        bias_E = config.next_bias(bias_E, counts, k)
    loads = chosen(bias_E).sum((0, 1))
    assert loads.max() < 1.08 * k * 1000
    assert bias_E.sum().abs() < 1e-5
    assert torch.equal(QuantileConfig(ema=1.0).next_bias(bias_E, counts, k), bias_E - bias_E.mean())
    assert torch.equal(config.next_bias(bias_E, counts, E), bias_E), "every token takes every expert"


class Odd(nn.Module):
    """Has buffers that no checkpoint holds."""

    def __init__(self, draw: Draw) -> None:
        super().__init__()
        self.draw = draw
        self.register_buffer("kept", torch.empty(2))
        self.register_buffer("none", None, persistent=False)
        self.register_buffer("scale", torch.empty(2), persistent=False)

    def draws(self) -> dict[str, Draw]:
        return {"kept": normal(1.0), "scale": self.draw}


def test_what_no_checkpoint_holds_is_set() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Odd(constant(3.0)))
    set_unsaved(model, "cpu")
    assert model[0].scale.tolist() == [3.0, 3.0]
    assert model[0].kept.is_meta
    with pytest.raises(ValueError, match=r"0\.scale is a buffer that checkpoints do not hold, and begins"):
        set_unsaved(nn.Sequential(Odd(normal(1.0))))
    odd = Odd(constant(3.0))
    odd.register_buffer("other", torch.empty(2))
    with pytest.raises(ValueError, match=r"^other has no first value: give Odd a method draws\(\)"):
        init_weights(odd, 0)


@each_router
def test_a_model_without_weights_has_its_counts(router) -> None:
    model = vit_config(router, layers=(0, 1)).build(seed=None)
    assert not any(buffer.any() for name, buffer in model.named_buffers() if name.endswith("counts"))

"""Dropless routing: the results of slots for every token, computed in rows of any number."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe.experts import grouped_matmul_fits
from moe.init import mix
from moe.layout import ParallelConfig
from moe.overrides import RoutingOverrides
from moe.parallel import build_whole
from moe.routers import TokenChoiceConfig, TopKConfig
from moe.routers.balance import SignConfig
from moe.rows import RowsRouting, sort_by_expert
from tests.lanes import mostly_smoke
from tests.moe.parts import build_layer, images, randn, vit_config

E, S, D = 4, 12, 8
ROWS = TopKConfig(k=2, score="sigmoid", balance=SignConfig(), balance_weight=0.1, capacity_factor="dropless")
SLOTS = replace(ROWS, capacity_factor=E / 2)  # one for each token in each expert
X_BSD, VALID_B = 2 * randn(6, S, D), torch.tensor([1.0, 1, 0, 1, 1, 0])


@contextmanager
def calls(monkeypatch) -> Iterator[list[Tensor]]:
    """The rows of each grouped matmul."""
    seen, grouped = [], F.grouped_mm
    with monkeypatch.context() as patch:
        patch.setattr(
            F, "grouped_mm", lambda x, *args, **kwargs: seen.append(x) or grouped(x, *args, **kwargs)
        )
        yield seen


def test_rows_by_hand():
    """Three tokens choose (1, 0), (1, 2), (2, 0); the second one is padding."""
    expert_GSK = torch.tensor([[[1, 0], [1, 2], [2, 0]]])
    computed = torch.tensor([[True, False, True]]).unsqueeze(-1).expand(1, 3, 2)
    order_M, count_E = sort_by_expert(expert_GSK, computed, 3)
    assert order_M.tolist() == [1, 5, 0, 4, 2, 3]
    assert count_E.tolist() == [2, 1, 1]
    routing = RowsRouting(
        gates_GSE=torch.empty(1, 3, 3),
        aux_G=torch.zeros(1),
        expert_GSK=expert_GSK,
        weight_GSK=torch.tensor([[[0.5, 2.0], [0.0, 0.0], [3.0, 1.0]]]),
        order_M=order_M,
        count_E=count_E,
    )
    assert routing.dispatch(torch.tensor([[[1.0], [2], [3]]])).flatten().tolist() == [1, 3, 1, 3, 0, 0]
    y_MD = torch.tensor([[10.0], [20], [30], [40], [50], [60]])
    # 0.5 * row 2 + 2 * row 0; nothing; 3 * row 3 + row 1
    assert routing.combine(y_MD).flatten().tolist() == [35, 0, 140]


@pytest.mark.parametrize(
    ("dtype", "dim", "grouped", "tolerance"),
    [
        (torch.float64, D, False, 1e-12),
        (torch.float32, D, True, 1e-5),
        (torch.float32, 6, False, 1e-5),  # rows of 24 bytes
        (torch.bfloat16, D, True, 0.05),
        (torch.bfloat16, 12, False, 0.05),
    ],
    ids=str,
)
@pytest.mark.parametrize("images_per_group", [1, 2])
def test_equals_slots_for_every_token(monkeypatch, dtype, dim, grouped, tolerance, images_per_group):
    """Output, statistics and all gradients, with padding and an expert that no token chooses."""
    results = []
    for router in (ROWS, SLOTS):
        layer = build_layer(router, dim=dim, images_per_group=images_per_group).to(dtype)
        layer.router.bias_E[3] = -9.0
        assert grouped_matmul_fits(layer.experts.w_in_EDF) == grouped
        x = 2 * randn(6, S, dim).to(dtype)
        x.requires_grad_()
        with calls(monkeypatch) as seen:
            y, routing = layer(x, VALID_B)
        assert bool(seen) == (grouped and router is ROWS)
        ((y.square().sum((1, 2)) * VALID_B).sum() + routing.aux_G.mean()).backward()
        gradients = {"x": x.grad} | {name: p.grad for name, p in layer.named_parameters()}
        results.append((y[VALID_B == 1], routing.stats, routing.counts, gradients))
    (y, stats, counts, gradients), (other_y, other_stats, other_counts, others) = results
    torch.testing.assert_close(stats, other_stats)
    assert torch.equal(counts, other_counts)
    for name, (ours, theirs) in {"y": (y, other_y), **{n: (gradients[n], others[n]) for n in others}}.items():
        assert (ours - theirs).norm() <= tolerance * theirs.norm(), name
    assert results[0][3]["experts.w_in_EDF"][3].eq(0).all()
    assert results[0][1]["dropped_frac"] == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_no_choice_at_all(dtype):
    """Images of padding alone: no rows, and zero gradients."""
    layer = build_layer(ROWS).to(dtype)
    y, _ = layer(X_BSD.to(dtype), torch.zeros(6))
    assert y.eq(0).all()
    y.sum().backward()
    assert all(p.grad.eq(0).all() for p in layer.experts.parameters())


POINTS = [
    {"k": 1},
    {"k": E},
    {"experts": 2},
    {"experts": (0, 2)},
    {"k": 1, "experts": 3, "subset_seed": 5},
    {"random_blocks": (0,)},
]


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("point", POINTS, ids=str)
def test_operating_points_equal_those_of_slots(point, gradients):
    rows, slots = build_layer(ROWS).double(), build_layer(SLOTS).double()
    room = {"capacity_factor": E / point.get("k", 2)}
    with torch.set_grad_enabled(gradients):
        got, routing = rows(X_BSD.double(), VALID_B, None, RoutingOverrides(**point))
        expected, other = slots(X_BSD.double(), VALID_B, None, RoutingOverrides(**point, **room))
    torch.testing.assert_close(got[VALID_B == 1], expected[VALID_B == 1])
    torch.testing.assert_close(routing.stats, other.stats)


def test_capacity_is_an_operating_point():
    """A dropless model runs with a capacity, and one with a capacity dropless; token choice refuses it."""
    rows, slots = build_layer(ROWS), build_layer(replace(ROWS, capacity_factor=0.5))
    tight, free = RoutingOverrides(capacity_factor=0.5), RoutingOverrides(capacity_factor="dropless")
    x = X_BSD, torch.ones(6)
    assert torch.equal(rows(*x, None, tight)[0], slots(*x)[0])
    assert torch.equal(slots(*x, None, free)[0], rows(*x)[0])
    assert not torch.allclose(rows(*x)[0], slots(*x)[0])
    evaluated = build_layer(replace(ROWS, capacity_factor=0.5, eval_capacity_factor="dropless"))
    assert torch.equal(evaluated(*x)[0], slots(*x)[0])
    assert torch.equal(evaluated.eval()(*x)[0], rows(*x)[0])
    with pytest.raises(ValueError, match="capacity_factor must be a number, got 'dropless'"):
        build_layer(TokenChoiceConfig())(*x, None, free)


def test_only_choices_of_the_chosen_experts_are_computed(monkeypatch):
    """Their cost is that of a mean expert: the costs of each expert alone add up to that of all."""
    layer = build_layer(ROWS)
    with calls(monkeypatch) as seen, torch.no_grad():
        for e in range(E):
            layer(X_BSD, VALID_B, None, RoutingOverrides(experts=(e,)))
    rows = [len(x) for x in seen[::2]]
    assert sum(rows) == VALID_B.sum() * S * 2
    assert len(set(rows)) > 1
    config = vit_config(ROWS)
    assert 4 * config.expert_rows(RoutingOverrides(experts=(3,))) == config.expert_rows() == 32


def test_dropout_belongs_to_a_choice():
    """Each choice of a token drops other numbers, the same for any cut of the batch;
    one expert after another drops the same as all in one matmul.
    """
    layer = build_layer(ROWS, expert_dropout=0.5)
    nn.init.ones_(layer.experts.b_out_ED)
    keys_B, seen = torch.arange(6), []
    layer.experts.register_forward_hook(lambda module, args, y_MD: seen.append(y_MD.detach()))
    whole = layer(torch.ones_like(X_BSD), torch.ones(6), keys_B)[0]
    assert len({tuple(row.tolist()) for row in seen[0] == 0}) > 100, "of 144 patterns of 8 bits"
    parts = [layer(torch.ones(3, S, D), torch.ones(3), keys)[0] for keys in keys_B.chunk(2)]
    torch.testing.assert_close(torch.cat(parts), whole)
    exact = layer.double()(torch.ones_like(X_BSD).double(), torch.ones(6), keys_B)[0]
    torch.testing.assert_close(exact, whole.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "option", mostly_smoke(["activation_checkpointing", "compile"], fast=["activation_checkpointing"])
)
def test_recomputation_and_compilation_change_nothing(monkeypatch, option):
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **rest: compiler(f, **rest | {"backend": "eager"}))
    results = []
    for options in (ParallelConfig(), ParallelConfig(**{option: True})):
        config = vit_config(ROWS, expert_dropout=0.1)
        model = build_whole(config, torch.device("cpu"), seed=0, options=options)
        nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(0))
        for seed in range(3):  # other numbers of rows
            output = model(images(4, seed=seed), keys_B=mix(torch.arange(4), seed))
            (output.logits.square().sum() + output.aux).backward()
        results.append({name: p.grad for name, p in model.named_parameters()})
    torch.testing.assert_close(*results)

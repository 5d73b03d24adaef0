"""Compiled blocks train as eager ones do, with as few graphs however deep the model is."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters

from moe.overrides import AS_TRAINED
from moe.parallel import ParallelConfig, build_sharded, make_mesh
from moe.routers import TokenChoiceConfig
from tests.lanes import mostly_slow
from tests.moe.parity import (
    BATCH,
    SEED,
    Case,
    compare,
    default_dtype,
    one_process,
    one_rank,
    read,
    share,
    spawn,
    train,
    vit,
)

CASE = Case(  # without noise, whose float32 compilers round in their own way
    config=vit(TokenChoiceConfig(k=2, priority="max", importance_weight=0.1, noise_std=0.0)),
    after=AS_TRAINED,
)
OPTIONS = ParallelConfig(compile=True, activation_checkpointing=True, overlap_chunks=2)


def worker(rank: int, ranks: int, folder: str) -> None:
    expected, mine = read(folder)["compiled"], share(rank, ranks, BATCH)
    with default_dtype(CASE.dtype):
        model = build_sharded(CASE.config, make_mesh("cpu", ep=2), seed=SEED, options=OPTIONS)
        got = train(model, CASE, mine)
    compare(got, expected, mine, 1e-12, "compiled")


@pytest.mark.slow
def test_compiled_equals_eager(tmp_path):
    one_process({"compiled": CASE}, tmp_path)
    spawn(2, worker, str(tmp_path))


@pytest.mark.parametrize("compute_dtype", mostly_slow([None, torch.bfloat16], fast=[torch.bfloat16]), ids=str)
def test_graphs_do_not_grow_with_depth(monkeypatch, compute_dtype):
    """A dense block is one graph. One with experts is five: before and after them, within `Block` and within
    `MoELayer`, and their MLPs; under bfloat16 the router, a unit of FSDP, adds two."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    found = []
    for depth in (2, 6):
        torch.compiler.reset()
        counters.clear()
        config = replace(CASE.config, depth=depth)
        with one_rank("cpu") as mesh:
            model = build_sharded(config, mesh, seed=SEED, options=OPTIONS, compute_dtype=compute_dtype)
            images, keys_B = torch.randn(BATCH, 3, 8, 8), torch.arange(BATCH)
            model(images, keys_B=keys_B).logits.sum().backward()
        found.append((counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())))
    assert found == 2 * [(1 + 5, 2) if compute_dtype is None else (1 + 7, 3)]

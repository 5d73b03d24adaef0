"""A model split over 2 or 4 processes trains as one process does, whatever the shape of the mesh.

One launch per number of ranks runs all cases, because importing torch takes longer than a case. The parent
computes the results of one process without `parallel` and passes them on in a file.
"""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from moe.codec import from_dict
from moe.layer import MoEConfig
from moe.layout import ParallelConfig, check_layout
from moe.model import ModelConfig
from moe.overrides import AS_TRAINED, RoutingOverrides
from moe.parallel import build_sharded, build_whole, make_mesh, update
from moe.presets import PRESETS
from moe.routers import (
    ExpertChoiceConfig,
    MixtureConfig,
    ReLUConfig,
    SoftConfig,
    TokenChoiceConfig,
    TopKConfig,
)
from moe.routers.affinity import SinkhornConfig, SparseTransportConfig
from moe.routers.balance import QuantileConfig, SignConfig
from tests.lanes import absent_guests, mostly_slow
from tests.moe.parity import (
    BATCH,
    MAX_NORM,
    SEED,
    Case,
    check_equal,
    compare,
    default_dtype,
    one_process,
    one_rank,
    read,
    share,
    spawn,
    train,
)
from tests.moe.parts import vit_config
from tests.own.convnet import ConvNetConfig

LAYOUTS = {2: [(2, 1), (1, 2)], 4: [(2, 2), (4, 1), (1, 4)]}  # ranks -> (dp, ep)
MIXED = {2: (1, 2), 4: (2, 2)}

SOFT = SoftConfig(slots_per_expert=2, noise_std=0.5)
TOKENS = TokenChoiceConfig(
    k=2, capacity_factor=0.8, priority="max", importance_weight=0.1, load_weight=0.1, z_weight=0.01
)
EXPERTS = ExpertChoiceConfig(capacity_factor=1.5, noise_std=1.0)
SINKHORN = TokenChoiceConfig(k=2, affinity=SinkhornConfig(), combine="affinity")
LOSS_FREE = TopKConfig(
    k=2,
    score="sigmoid",
    normalise=True,
    balance=SignConfig(rate=0.1),
    balance_weight=0.1,
    balance_level="batch",
    z_weight=0.01,
)
FAMILIES = {
    "dense": vit_config(None),
    "soft": vit_config(SOFT),
    "token choice": vit_config(TOKENS, images_per_group=2, expert_dropout=0.1),
    "expert choice": vit_config(EXPERTS),
    "sinkhorn": vit_config(SINKHORN, images_per_group=2),
}
EVERYWHERE = {name: Case(config=config) for name, config in FAMILIES.items()}
# The parts tested here do not depend on the split: one layout and few steps are enough.
ONCE = {
    "soft, 2 images": Case(config=vit_config(SOFT, images_per_group=2, expert_dropout=0.1)),
    "token choice, 1 image, in order": Case(config=vit_config(replace(TOKENS, priority="none"))),
    "expert choice, 2 images": Case(config=vit_config(EXPERTS, images_per_group=2, expert_dropout=0.1)),
    "sparse transport": Case(
        config=vit_config(
            ExpertChoiceConfig(affinity=SparseTransportConfig(iterations=50)), images_per_group=2
        )
    ),
    "dropout, drop path and LayerScale": Case(
        config=replace(vit_config(TokenChoiceConfig(k=2)), dropout=0.2, drop_path=0.3, layer_scale=2.0)
    ),
    "convolutions first": Case(config=replace(vit_config(SOFT), stem="conv")),
    "mixture": Case(config=vit_config(MixtureConfig(level="image"), images_per_group=2, expert_dropout=0.2)),
    "a user's convolutions": Case(
        config=ConvNetConfig(
            moe=MoEConfig(
                layers="last_1", num_experts=4, images_per_group=2, expert_dropout=0.1, router=TOKENS
            )
        )
    ),
    "loss-free": Case(config=vit_config(LOSS_FREE, images_per_group=2, expert_dropout=0.1), steps=6),
    "shared": Case(config=vit_config(LOSS_FREE, shared_dim=24, expert_dim=32, expert_dropout=0.1)),
    "quantile": Case(config=vit_config(TopKConfig(k=2, score="sigmoid", balance=QuantileConfig())), steps=6),
    "dropless": Case(
        config=vit_config(replace(LOSS_FREE, capacity_factor="dropless"), layers=(0, 1), expert_dropout=0.1),
        steps=6,
    ),
    "relu": Case(config=vit_config(ReLUConfig(k=2, coefficient=1e-3), layers=(0, 1)), steps=6),
    "overridden": Case(
        config=vit_config(TokenChoiceConfig(k=2), images_per_group=2, expert_dropout=0.1),
        overrides=RoutingOverrides(k=1, capacity_factor=0.6, priority="max", experts=3),
    ),
}
if not absent_guests():  # the only model with batch norm is one of theirs
    sizes = {"image_size": 16, "num_classes": 10, "stem_width": 8, "head_dim": 8}
    blocks = {"stages": "CT", "widths": (8, 16), "depths": (2, 2)}
    moe = MoEConfig(layers="last_1", num_experts=4, images_per_group=2, router=SOFT, residual=False)
    # Padded images are normalised here too, by the statistics of those that are not.
    ONCE["batch norm"] = Case(
        config=replace(from_dict(ModelConfig, {"kind": "astroformer", **sizes, **blocks}), moe=moe),
        after=RoutingOverrides(experts=2, random_blocks=(3,)),
    )
CASES = EVERYWHERE | ONCE
LONG = {f"{name}, long": replace(case, steps=20) for name, case in EVERYWHERE.items()}
LONG |= {f"{name}, float32": replace(case, dtype=torch.float32) for name, case in LONG.items()}
FAST = {
    name: case
    for name, case in CASES.items()
    if name in ("token choice", "batch norm", "loss-free", "dropless")
}
REST = {name: case for name, case in CASES.items() if name not in FAST}


def worker(rank: int, ranks: int, folder: str) -> None:
    expected, mine = read(folder), share(rank, ranks, BATCH)
    for dp, ep in LAYOUTS[ranks]:
        mesh = make_mesh("cpu", ep=ep)
        assert mesh.shape == (dp, ep)
        for name, result in expected.items():
            if name not in ONCE or (dp, ep) == MIXED[ranks]:
                check_equal(name, (CASES | LONG)[name], mesh, mine, result)


def reference(cases: dict[str, Case], folder: Path) -> None:
    """Results of plain torch in one process, and a check that every case clips and has gradients."""
    for name, result in one_process(cases, folder).items():
        assert max(result.norms) > MAX_NORM, f"{name} never clips"
        assert all(gradient.abs().max() > 0 for gradient in result.gradients.values()), name
        assert min(logits.std() for logits in result.logits) > 0.02, name
        assert len(result.logits) == 1 or not torch.allclose(*result.logits), name


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        pytest.param(2, FAST, id="2"),
        pytest.param(2, REST, id="2, rest", marks=pytest.mark.smoke),
        pytest.param(4, CASES | LONG, id="4", marks=pytest.mark.slow),
    ],
)
def test_equals_one_process(ranks, cases, tmp_path):
    """All cases give different losses, so equal results mean something."""
    reference(cases, tmp_path)
    assert len({tuple(result.losses) for result in read(tmp_path).values()}) == len(cases)
    spawn(ranks, worker, str(tmp_path))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("kind", "fused"), [(torch.optim.AdamW, True), (torch.optim.SGD, False)])
def test_update_clips_as_torch_does_in_one_process(kind, fused, dtype):
    """A fused optimiser in float32 divides gradients itself; the result is that of a pass before it."""

    def layer() -> nn.Linear:
        torch.manual_seed(0)
        module = nn.Linear(5, 4, dtype=dtype)
        module(torch.randn(3, 5, dtype=dtype)).square().sum().backward()
        module.bias.grad = None  # a parameter without a gradient does not count
        return module

    for max_norm in (0.1, 1e6, None):
        ours, theirs = layer(), layer()
        optimizers = [kind(module.parameters(), lr=0.1, fused=fused) for module in (ours, theirs)]
        norm = update(ours, optimizers[0], max_norm)
        bound = float("inf") if max_norm is None else max_norm
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(theirs.parameters(), bound))
        optimizers[1].step()
        torch.testing.assert_close(ours.weight.grad, theirs.weight.grad)
        torch.testing.assert_close(ours.weight, theirs.weight)


@pytest.mark.parametrize(
    ("config", "layout", "message"),
    [
        (
            {"num_experts": 6},
            {"dp": 1, "ep": 4},
            r"num_experts=6 does not divide over ep=4; use one of \[1, 2, 3, 6\]",
        ),
        ({}, {"dp": 3, "ep": 1}, "32 rows in each expert, which dp=3 does not"),
        ({"mlp_dim": 132}, {"dp": 8, "ep": 1}, "132 rows in each expert, which dp=8 does not"),
        ({}, {"dp": 6, "ep": 1, "dp_replicate": 4}, "dp_replicate=4 does not divide dp=6"),
        # each copy is sharded over dp / dp_replicate ranks
        ({}, {"dp": 6, "ep": 1, "dp_replicate": 2}, "which dp / dp_replicate = 6 / 2 does not divide"),
        ({"num_experts": 6}, {"dp": 2, "ep": 3}, None),
        ({}, {"dp": 6, "ep": 1, "dp_replicate": 3}, None),
        ({"moe": None}, {"dp": 3, "ep": 7}, None),  # without experts every layout is possible
    ],
)
def test_layouts(config, layout, message):
    moe = MoEConfig(num_experts=config.get("num_experts", 4))
    fields = {"moe": moe} | {name: value for name, value in config.items() if name != "num_experts"}
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        check_layout(replace(PRESETS["debug"], **fields), **layout)


TO_COMPILE = Case(  # without noise, whose float32 compilers round in their own way
    config=vit_config(TokenChoiceConfig(k=2, priority="max", importance_weight=0.1, noise_std=0.0)),
    after=AS_TRAINED,
)
COMPILED = ParallelConfig(compile=True, activation_checkpointing=True, overlap_chunks=2)


def compiled_worker(rank: int, ranks: int, folder: str) -> None:
    expected, mine = read(folder)["compiled"], share(rank, ranks, BATCH)
    with default_dtype(TO_COMPILE.dtype):
        model = build_sharded(TO_COMPILE.config, make_mesh("cpu", ep=2), seed=SEED, options=COMPILED)
        got = train(model, TO_COMPILE, mine)
    compare(got, expected, mine, 1e-12, "compiled")


@pytest.mark.slow
def test_compiled_equals_eager(tmp_path):
    one_process({"compiled": TO_COMPILE}, tmp_path)
    spawn(2, compiled_worker, str(tmp_path))


@pytest.mark.parametrize("compute_dtype", mostly_slow([None, torch.bfloat16], fast=[torch.bfloat16]), ids=str)
@pytest.mark.smoke
def test_graphs_do_not_grow_with_depth(monkeypatch, compute_dtype):
    """A dense block is one graph. A MoE block is five: before and after its experts, in `Block` and in
    `MoELayer`, and the experts' MLPs; under bfloat16 the router, a unit of FSDP, adds two."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    found = []
    for depth in (2, 6):
        torch.compiler.reset()
        counters.clear()
        config = replace(TO_COMPILE.config, depth=depth)
        with one_rank("cpu") as mesh:
            model = build_sharded(config, mesh, seed=SEED, options=COMPILED, compute_dtype=compute_dtype)
            images, keys_B = torch.randn(BATCH, 3, 8, 8), torch.arange(BATCH)
            model(images, keys_B=keys_B).logits.sum().backward()
        found.append((counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())))
    assert found == 2 * [(1 + 5, 2) if compute_dtype is None else (1 + 7, 3)]


@pytest.mark.smoke
def test_no_block_runs_uncompiled_however_many_batch_sizes(monkeypatch):
    """Dense and MoE blocks, here in evaluation alone, share one limit."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch.compiler.reset()
    counters.clear()
    config = replace(TO_COMPILE.config, depth=2)
    model = build_whole(config, torch.device("cpu"), seed=SEED, options=ParallelConfig(compile=True))
    with torch.no_grad():
        for size in (8, 6, 4, 3, 2, 8):
            model(torch.randn(size, 3, 8, 8), torch.ones(size))
    assert counters["stats"]["unique_graphs"] > 8
    assert not [reason for reason in counters["unimplemented"] if "recompile limit" in reason]

"""Dry runs against the steps of real workers, and by hand."""

import gc
import json
from itertools import cycle
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

from moe.config import members
from moe.cost import num_expert_params, num_params
from moe.layout import local_part
from moe.parallel import set_weights
from moe.presets import PRESETS
from moe.routing import RouterConfig
from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.estimate import layout
from orchestrator.optimizers import OptimizerConfig
from orchestrator.sweeps.scales import TINY
from orchestrator.training.average import Average
from orchestrator.training.dry_run import STEP_PHASES, Collective, Recorder, dry_run, fake_batch
from orchestrator.training.loop import train_step
from orchestrator.training.worker import build_model
from tests.lanes import mostly_smoke
from tests.moe.parity import spawn

MODEL = {"image_size": 32, "width": 128, "depth": 2, "mlp_dim": 512, "num_classes": 12}
SOFT = {"model.moe.router.kind": "soft", "model.moe.num_experts": 8}
SPREAD = SOFT | {"scale.ep": 2}
CASES: dict[str, dict[str, Any]] = {
    "dense": {"model.moe": None, "train.ema": {}},
    "soft": SOFT,
    "soft, spread": SPREAD,
    "soft, spread, bfloat16, three passes": SPREAD | {"passes": 3, "train.compute_dtype": "bfloat16"},
    "soft, spread, recomputed, adafactor": SPREAD
    | {"scale.activation_checkpointing": True, "train.optimizer.kind": "adafactor"},
    "token choice, copies, lamb": {
        "model.moe.router.kind": "token_choice",
        "model.moe.num_experts": 8,
        "scale.dp_replicate": 2,
        "train.optimizer.kind": "lamb",
    },
}

# Two workers take fewer cases than four: what these two have, the others have too.
SIMPLE = ("soft", "soft, spread")


def cases_of(workers: int) -> dict[str, dict[str, Any]]:
    return {name: case for name, case in CASES.items() if workers == 4 or name not in SIMPLE}


def run_of(workers: int, changes: dict[str, Any], images: int = 8) -> RunConfig:
    """A model of 2 blocks, one of them with 8 experts; `images` per worker and pass."""
    changes = {f"model.{name}": value for name, value in MODEL.items()} | changes
    batch = images * changes.pop("passes", 1) * workers
    fields = {"scale.workers": workers, "data.batch_size": batch, "train.microbatch": images}
    return override(RunConfig(), fields | changes)


def measure(run: RunConfig) -> dict[str, Any]:
    """Takes two steps of a worker. Returns the bytes of its parameters and of its optimiser's state; those of
    the storages of all tensors at most, by phase of the second step; and what torch's allocator had given at
    most in both steps, which includes what kernels allocate for themselves.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as allocator:
        model = build_model(run, torch.device("cpu"), seed=None)
        set_weights(model, 0)
        optimizer = run.train.optimizer.build(model)
        if run.train.ema:
            Average(run.train.ema, optimizer)
        batch = fake_batch(run)
        with Recorder() as recorder:
            recorder.add([*map(local_part, (*model.parameters(), *model.buffers())), *batch.tensors()])
            for step in range(2):
                recorder.peaks.clear()
                train_step(model, optimizer, batch, run, step=step)
    allocated = peak = 0
    events: list[Any] = cast(Any, allocator.profiler).kineto_results.events()
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            allocated += event.nbytes()
            peak = max(peak, allocated)
    state = tree_leaves(list(optimizer.state.values()))
    return {
        "parameters": sum(local_part(p).nbytes for p in (*model.parameters(), *model.buffers())),
        "optimizer": sum(local_part(x).nbytes for x in state if isinstance(x, torch.Tensor)),
        "peaks": recorder.peaks,
        "allocated": peak,
    }


def measure_all(rank: int, ranks: int, folder: str) -> None:
    found = {}
    for name, changes in cases_of(ranks).items():
        found[name] = measure(run_of(ranks, changes))
        gc.collect()
    Path(folder, f"{rank}.json").write_text(json.dumps(found))


@pytest.mark.smoke
@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_equals_workers(workers: int, tmp_path: Path) -> None:
    """Parameters and state of the first worker exactly, its memory within 10 %.

    The allocator misses what gloo's own threads free, so it counts too much on some of the workers.
    """
    spawn(workers, measure_all, str(tmp_path))
    real = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(workers)]
    for name, changes in cases_of(workers).items():
        found, first = dry_run(run_of(workers, changes)), real[0][name]
        assert (found.parameters, found.optimizer) == (first["parameters"], first["optimizer"]), name
        for phase in STEP_PHASES:
            assert found.peaks[phase] == pytest.approx(first["peaks"][phase], rel=0.1), (name, phase)
        allocated = min(each[name]["allocated"] for each in real)
        assert max(found.peaks.values()) == pytest.approx(allocated, rel=0.1), name


def test_what_the_data_would_say_is_not_needed() -> None:
    """Balanced weights of classes are counted in the data, and have no part in memory but their own."""
    balanced = dry_run(run_of(1, SOFT | {"task.class_weights": "balanced"}))
    assert balanced.parameters == dry_run(run_of(1, SOFT)).parameters


def test_collectives_by_hand() -> None:
    """One block of two has experts, one for each of 4 workers, which receive 16 rows of width 32 per image:
    forward there and back, backward the same way.
    """
    router = {"model.moe.router.kind": "expert_choice", "model.moe.num_experts": 4, "model.num_classes": 12}
    scale = {"scale.workers": 4, "scale.ep": 4, "data.batch_size": 32}
    run = override(RunConfig(model=PRESETS["debug"]), router | scale)
    found = dry_run(run).collectives
    assert found[Collective("all_to_all", 4, 1)] == (4, 4 * 8 * 16 * 32 * 4 * 3 // 4)
    dense = num_params(run.model) - num_expert_params(run.model)
    outside = 32 * 12 + 32 + 16 * 32 + 2 * 32 + 12 * 33  # embed, position, norm, head: gathered once
    gathers, gathered = found[Collective("all_gather", 4, 1)]
    assert (gathers, gathered) == (5, 4 * (2 * dense - outside) * 3 // 4)
    assert found[Collective("reduce_scatter", 4, 1)] == (3, 4 * dense * 3 // 4)
    assert {of.kind for of in found} == {"all_to_all", "all_gather", "reduce_scatter", "all_reduce"}


@pytest.mark.slow
def test_shares_of_large_experts() -> None:
    """On 512 workers: no tensor of a whole stack of experts (1 GiB in bfloat16) is counted."""
    scale = {"scale.workers": 512, "scale.ep": 128, "data.batch_size": 4096, "scale.use_gpu": True}
    run = override(RunConfig(model=PRESETS["soft-L/16-128e"]), scale)
    assert max(dry_run(run).peaks.values()) == pytest.approx(layout(run, 128).peak(), rel=0.1)


ROUTERS, OPTIMIZERS = ([each.kind for each in members(of)] for of in (RouterConfig, OptimizerConfig))


@pytest.mark.parametrize(
    ("router", "optimizer"),
    mostly_smoke(zip(ROUTERS, cycle(OPTIMIZERS), strict=False), fast=[("token_choice", "adamw")]),
)
def test_every_router_and_every_optimizer(router: str, optimizer: str) -> None:
    assert len(ROUTERS) >= len(OPTIMIZERS)
    kinds = {"model.moe.router.kind": router, "train.optimizer.kind": optimizer}
    run = run_of(4, SPREAD | kinds | {"model.depth": 1, "model.moe.layers": (0,)}, images=1)
    found, state = dry_run(run), layout(run, 2).memory["optimizer"]
    assert found.collectives[Collective("all_to_all", 2, 1)][0] >= 4  # of one layer
    assert state <= found.optimizer <= state + 500  # counts of updates


@pytest.mark.guests
@pytest.mark.parametrize("sweep", mostly_smoke(["lit", "language", "expert_count_cifar"], fast=["language"]))
def test_other_models_and_tasks(sweep: str) -> None:
    found = dry_run(override(TINY.of(sweep, {}).base, {"scale.workers": 4, "data.batch_size": 64}))
    assert found.peaks.keys() == {*STEP_PHASES}
    assert found.parameters + found.optimizer < min(found.peaks.values())


def test_one_worker_in_bfloat16() -> None:
    """It holds copies of its weights too, and sends nothing."""
    found = dry_run(run_of(1, SOFT | {"train.compute_dtype": "bfloat16"}))
    assert found.peaks["optimizer"] > found.optimizer + 2.5 * found.parameters  # gradients, and half
    assert not found.collectives

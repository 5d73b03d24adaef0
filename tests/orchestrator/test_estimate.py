"""Memory, traffic, layouts and device time of runs, by hand."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from moe.cost import model_costs, num_expert_params, num_params, train_flops_6mac
from moe.layout import local_part
from moe.models.vit import ViT
from moe.parallel import build_sharded, make_mesh
from moe.presets import PRESETS
from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.errors import UsageError
from orchestrator.estimate import (
    GIB,
    Layout,
    Links,
    Sent,
    checkpoint_bytes,
    checkpoints_kept,
    choose,
    estimate,
    layout,
    layouts,
    memory_problem,
    resolve_auto,
)
from orchestrator.optimizers import AdafactorConfig, AdamWConfig, OptimizerConfig, SGDConfig
from orchestrator.training.dry_run import fake_ranks

SOFT = {"model.moe.router.kind": "soft", "model.moe.num_experts": 4}
CHOICE = {"model.moe.router.kind": "expert_choice", "model.moe.num_experts": 4, "model.num_classes": 12}


def run_of(model: str = "debug", **changes: Any) -> RunConfig:
    fields = {name.replace("__", "."): value for name, value in changes.items()}
    workers = fields.get("scale.workers", 1)
    batch = fields.pop("images", 8) * workers
    return override(RunConfig(model=PRESETS[model]), {"data.batch_size": batch, "data.lanes": batch} | fields)


def bytes_of_moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Returns the bytes of this rank's state after an update, without the counts of updates."""
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    items = [item for state in optimizer.state.values() for item in state.items()]
    return sum(local_part(tensor).nbytes for name, tensor in items if name != "step" and tensor is not None)


def sums(run: RunConfig) -> dict[str, float]:
    return {name: sent.intra + sent.inter for name, sent in layout(run, run.ep()).traffic.items()}


def test_peak_by_hand() -> None:
    """At the start of the backward pass; at the update where gradients are larger than activations."""
    run = run_of(images=64, **CHOICE)
    memory = layout(run, 1).memory
    assert memory["parameters"] == 4 * num_params(run.model)
    assert memory["optimizer"] == 8 * num_params(run.model)
    assert memory["activations"] == 64 * sum(model_costs(run.model).activations.saved)
    assert memory["buffers"] == 64 * 4 * 16 * (128 + 32)  # gradients of a hidden layer, and of the tokens
    sgd = {"train.optimizer.kind": "sgd"}
    memory = layout(run_of(images=1, **CHOICE | sgd | {"model.num_classes": 5000}), 1).memory
    assert memory["gradients"] == memory["parameters"] == memory["optimizer"]
    assert memory["activations"] == memory["buffers"] == 0


@pytest.mark.parametrize(("dp", "ep", "copies"), [(2, 4, 1), (4, 2, 2)])
def test_a_rank_holds_what_a_sharded_model_holds(dp: int, ep: int, copies: int) -> None:
    """The first of 8 ranks: the 10 classes of the head do not divide, so it holds more than an eighth."""
    fields = {"train.optimizer.kind": "adafactor", "train.optimizer.min_dim_to_factor": 8}
    run = run_of(scale__workers=8, scale__ep=ep, scale__dp_replicate=copies, **SOFT | fields)
    with fake_ranks(8):
        model = build_sharded(run.model, make_mesh("cpu", ep=ep, dp_replicate=copies), seed=0)
        held = sum(p.to_local().nbytes for p in model.parameters())
        moments = bytes_of_moments(model, run.train.optimizer.build(model))
    assert layout(run, ep).dp == dp
    assert layout(run, ep).memory["parameters"] == held
    assert layout(run, ep).memory["optimizer"] == moments


def test_traffic_by_hand() -> None:
    """16 tokens, capacity factor 1: 16 rows of width 32 per image, exchanged four times."""
    run = run_of(scale__workers=4, scale__ep=4, **CHOICE)
    sent = sums(run)
    assert sent["all_to_all"] == 4 * 8 * 16 * 32 * 4 * 3 / 4
    experts = num_expert_params(run.model)
    dense = num_params(run.model) - experts
    assert sent["reduce_scatter"] == 4 * dense * 3 / 4
    outside = 32 * 12 + 32 + 16 * 32 + 2 * 32 + 12 * 33  # embed, position, norm, head
    assert sent["all_gather"] == 4 * (2 * dense - outside) * 3 / 4
    assert sent["all_reduce"] == 0
    copied = sums(run_of(scale__workers=4, scale__dp_replicate=2, **CHOICE))
    assert copied["all_reduce"] == 2 * 4 * num_params(run.model) / 2 / 2
    assert not any(sums(run_of(**CHOICE)).values())


def test_links_of_a_group() -> None:
    """Four devices per node: an EP group of 4 stays inside one, of 8 covers two, of 3 may lie across."""
    wide = CHOICE | {"model.width": 48, "model.mlp_dim": 192, "model.moe.num_experts": 24}

    def links(ep: int) -> Sent:
        run = run_of(images=1, scale__workers=24, scale__workers_per_node=4, scale__ep=ep, **wide)
        return layout(run, ep).traffic["all_to_all"]

    rows = 4 * 4 * 48 * 24  # bytes per slot of every expert
    whole = links(4).intra / (3 / 4)
    assert whole % rows == 0
    assert links(1) == Sent(0, 0)
    assert links(4).inter == 0
    assert links(8) == Sent(pytest.approx(whole * 3 / 8), pytest.approx(whole * 4 / 8))
    assert links(3) == Sent(
        0, pytest.approx(whole * 2 / 3)
    )  # the first of ranks 3, 4, 5 is alone in its node
    assert links(6) == Sent(pytest.approx(whole * 1 / 6), pytest.approx(whole * 4 / 6))


def test_every_layout_of_the_workers() -> None:
    def meshes(workers: int, **changes: Any) -> list[tuple[int, int]]:
        found = layouts(run_of(scale__workers=workers, scale__ep="auto", **changes))
        return [(one.dp, one.ep) for one in found]

    assert meshes(8, **SOFT) == [(8, 1), (4, 2), (2, 4)]
    assert meshes(8, model__moe=None) == [(8, 1)]
    assert meshes(1, **SOFT) == [(1, 1)]
    assert meshes(4, scale__dp_replicate=2, **SOFT) == [(4, 1), (2, 2)]  # every copy has its own experts
    six = SOFT | {"model.moe.num_experts": 6}
    assert meshes(6, **six) == [(2, 3), (1, 6)]  # 3 does not divide the width
    with pytest.raises(
        UsageError, match=r"no ep splits .* over 14 workers; ep=1: .*experts.* 32 rows .*dp=14 does not"
    ):
        meshes(14, **SOFT)


def test_choice_by_hand() -> None:
    def one(ep: int, gib: float, seconds: float) -> Layout:
        memory = {"parameters": GIB, "activations": (gib - 1) * GIB}
        return Layout(dp=8 // ep, ep=ep, memory=memory, traffic={}, seconds=seconds)

    found = [one(4, 2, 2), one(2, 3, 2), one(1, 4, 3)]
    assert choose(found).ep == 2  # as fast as 4, and smaller
    assert choose(found, memory_gib=2.9).ep == 4
    message = r"no layout fits 1.5 GiB; dp=2, ep=4 needs 2.0, of which 1.0 are activations: use more workers"
    with pytest.raises(UsageError, match=message):
        choose(found, memory_gib=1.5)
    with pytest.raises(UsageError, match="must be positive"):
        Links(inter_gb_per_s=0)
    assert Links(intra_gb_per_s=100, inter_gb_per_s=10).seconds(Sent(1e9, 1e9)) == pytest.approx(0.11)


def test_auto_becomes_a_number_that_follows_weights_and_rows() -> None:
    """Where expert weights are larger than rows, rows travel; where rows are larger, weights do."""

    def chosen(model: str, workers: int, images: int, **changes: Any) -> int:
        run = run_of(model, scale__workers=workers, scale__ep="auto", images=images, **changes)
        with pytest.raises(UsageError, match=r"scale\.ep=auto"):
            run.ep()
        return resolve_auto(run).ep()

    assert chosen("soft-H/14-256e", 512, 8) == 256
    assert chosen("soft-B/16-128e", 64, 16) == 64
    few, some, many = (chosen("vmoe-S/32", 32, images) for images in (8, 512, 4096))
    assert 32 == few >= some >= many
    assert many <= 8  # rows stay in the node, weights leave it
    assert chosen("debug", 8, 8) == 1
    fixed = resolve_auto(run_of(scale__workers=4, scale__ep=2, **SOFT))
    assert (fixed.scale.ep, fixed.train.compute_dtype) == (2, "float32")
    assert resolve_auto(fixed) is fixed
    on_gpus = override(run_of(scale__workers=4, **SOFT), {"scale.use_gpu": True})
    assert resolve_auto(on_gpus).train.compute_dtype == "bfloat16"


def test_device_time_and_disk_of_a_run() -> None:
    """FLOPs at the given rate, whatever the number of workers; a cooldown run pays for its own steps."""
    run = run_of(train__steps=100, images=64, **SOFT)
    found = estimate(run, flops_per_s=1e12)
    assert found.device_s == pytest.approx(train_flops_6mac(run.model, 6400) / 1e12)
    assert (found.family, found.params) == ("soft", num_params(run.model))
    assert found.memory_gib * GIB == pytest.approx(layout(run, 1).peak())
    assert found.disk_bytes == checkpoints_kept(run) * checkpoint_bytes(run)
    assert memory_problem(9, 10) == ""
    too_much = "needs 9.1 GiB per device, and 90% of its 10 GiB are 9: use more"
    assert memory_problem(9.1, 10).startswith(too_much)
    branch = override(run, {"train.trunk": "s3://runs/trunk/checkpoints/step-00000060"})
    assert estimate(branch, flops_per_s=1e12).device_s == pytest.approx(0.4 * found.device_s)


def test_checkpoints_that_stay_and_what_they_hold() -> None:
    for changes, kept in (
        ({}, 3),  # of ten the newest two, and the best
        ({"checkpoint.keep_best": 0}, 2),
        ({"checkpoint.keep_every": 50}, 5),
        ({"checkpoint.every": 60}, 2),  # there are only the steps 60 and 100
        ({"checkpoint.every": 1000}, 1),
    ):
        assert checkpoints_kept(run_of(**{"train.steps": 100} | changes)) == kept, changes


@pytest.mark.parametrize(
    "optimizer",
    [
        AdamWConfig(),
        AdamWConfig(state_dtype="bfloat16"),
        SGDConfig(),
        SGDConfig(momentum=0),
        AdafactorConfig(min_dim_to_factor=8),
    ],
    ids=str,
)
def test_bytes_of_the_optimizers_state(optimizer: OptimizerConfig) -> None:
    run = run_of(**SOFT)
    run = replace(run, train=replace(run.train, optimizer=optimizer))
    model = ViT(run.model)
    weights = sum(p.nbytes for p in model.parameters())
    moments = bytes_of_moments(model, optimizer.build(model))
    assert layout(run, 1).memory["optimizer"] == moments
    assert checkpoint_bytes(run) == weights + moments

"""The optimiser's state, carried over to a mixture that starts from a dense model."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moe.models.vit import ViT
from moe.parallel import build_sharded, make_mesh
from orchestrator.checkpoint.export import export
from orchestrator.checkpoint.files import OPTIMIZER
from orchestrator.checkpoint.manager import Checkpoints
from orchestrator.checkpoint.start import load_moments, start_from
from orchestrator.codec import override, to_dict
from orchestrator.config import CheckpointConfig, RunConfig
from orchestrator.errors import UsageError
from tests.moe.parity import spawn
from tests.orchestrator.checkpoint.small_runs import ADAFACTOR, SGD, assert_same, train, whole_state

DENSE = override(RunConfig(), {"model.width": 16, "model.mlp_dim": 32})
SPARSE = override(DENSE, {"model.moe.router.kind": "soft", "model.moe.num_experts": 4})
PREFIX = f"{OPTIMIZER}state."


def saved(folder: Path, run: RunConfig = DENSE) -> dict[str, torch.Tensor]:
    """Trains the dense model for three steps, saves it, and returns its whole state."""
    model = ViT(run.model, seed=1)
    optimizer = run.train.optimizer.build(model)
    train(model, optimizer, range(3))
    checkpoints = Checkpoints(f"{folder}/dense", CheckpointConfig(asynchronous=False))
    checkpoints.save(3, model, optimizer, images=24, progress={}, config=to_dict(run))
    checkpoints.finish()
    return whole_state(model, optimizer)


def worker(rank: int, ranks: int, folder: str) -> None:
    """Every layout has what one process has."""
    group = dist.new_group(backend="gloo")
    for ep in (1, 2):
        model = build_sharded(SPARSE.model, make_mesh("cpu", ep=ep), seed=9)
        optimizer = SPARSE.train.optimizer.build(model)
        load_moments(model, optimizer, start_from(model, f"{folder}/dense", group=group), group)
        assert_same(whole_state(model, optimizer), torch.load(f"{folder}/expected.pt"))


def test_experts_get_copies_and_routers_nothing(tmp_path: Path) -> None:
    """As sharded as the model may be. Training goes on from there."""
    dense, model = saved(tmp_path), ViT(SPARSE.model, seed=9)
    optimizer = SPARSE.train.optimizer.build(model)
    load_moments(model, optimizer, start_from(model, f"{tmp_path}/dense"))
    state = whole_state(model, optimizer)
    moments = {n.removeprefix(PREFIX): t for n, t in state.items() if n.startswith(PREFIX)}
    experts = [name for name in moments if ".experts." in name]
    assert {name.rpartition(".")[2] for name in experts} == {"step", "exp_avg", "exp_avg_sq"}
    for name, tensor in moments.items():
        if ".router." in name:
            assert not tensor.any(), name
        elif name in experts:
            part = name.replace("experts.w_in_EDF", "up.weight").replace("experts.b_in_EF", "up.bias")
            part = part.replace("experts.w_out_EFD", "down.weight").replace("experts.b_out_ED", "down.bias")
            there = dense[PREFIX + part]
            assert there.any() or name.endswith(".step")
            assert torch.equal(tensor, there.t().expand_as(tensor)), name
        else:
            assert torch.equal(tensor, dense[PREFIX + name]), name
    torch.save(state, tmp_path / "expected.pt")
    spawn(2, worker, str(tmp_path), timeout_s=60)
    assert all(loss == loss for loss in train(model, optimizer, range(3, 5)))
    steps = {name: float(optimizer.state[p]["step"]) for name, p in model.named_parameters()}
    assert {steps[n] for n in steps if ".router." in n} == {2}
    assert {steps[n] for n in steps if ".router." not in n} == {5}


def test_a_factored_state_starts_anew_where_its_shape_is_another(tmp_path: Path) -> None:
    dense = saved(tmp_path, override(DENSE, ADAFACTOR))
    run = override(SPARSE, ADAFACTOR)
    model = ViT(run.model, seed=9)
    optimizer = run.train.optimizer.build(model)
    load_moments(model, optimizer, start_from(model, f"{tmp_path}/dense"))
    state = whole_state(model, optimizer)
    same = [name for name in dense if name.startswith(PREFIX) and name in state]
    assert same
    assert_same({name: state[name] for name in same}, {name: dense[name] for name in same})
    assert all(loss == loss for loss in train(model, optimizer, range(3, 5)))


def test_weights_without_such_a_state_are_refused(tmp_path: Path) -> None:
    saved(tmp_path, override(DENSE, SGD))
    export(f"{tmp_path}/dense", f"{tmp_path}/dense.safetensors")
    model = ViT(SPARSE.model, seed=9)
    for source in ("dense", "dense.safetensors"):
        started = start_from(model, f"{tmp_path}/{source}")
        with pytest.raises(UsageError, match=f"{source}.* holds no state of the optimiser that this run has"):
            load_moments(model, SPARSE.train.optimizer.build(model), started)

"""A snapshot holds what the state was, and looks its tensors up only once: they stay where they are."""

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from orchestrator.checkpoint.snapshot import Snapshot
from orchestrator.checkpoint.state import state_of
from tests.orchestrator.checkpoint.small_runs import RUNS, built, one_rank, train


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("name", RUNS)
def test_training_replaces_no_tensor(name: str, sharded: bool) -> None:
    """Neither do evaluation, a change of the rate, or collecting the state."""
    with one_rank():
        model, optimizer = built(name, seed=0, **({"ep": 1} if sharded else {}))
        snapshot = Snapshot(model, optimizer)
        train(model, optimizer, range(3))
        with torch.no_grad():
            model(torch.zeros(8, 3, 8, 8, dtype=next(model.parameters()).dtype))
        train(model, optimizer, range(3, 5))
        planner = snapshot.take()
        now = state_of(model, optimizer)
        assert now.keys() == planner.copies.keys()
        for key, tensor in now.items():
            assert torch.equal(planner.copies[key], local(tensor)), key
        before = {key: copy.clone() for key, copy in planner.copies.items()}
        train(model, optimizer, range(5, 6))
        for key, copy in planner.copies.items():
            assert torch.equal(copy, before[key]), f"{key} is no copy"
        assert any(not torch.equal(before[key], local(t)) for key, t in state_of(model, optimizer).items())


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

"""The solvers of transport plans read no value on the host, which would wait for the device."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moe.routers.affinity import _alternate
from moe.routers.sparse_transport import _solve

G, S, E = 2, 24, 4
SOLVERS = {  # function, dtype of `valid`, arguments after it
    "sinkhorn": (_alternate, torch.bool, (20,)),
    "assignment": (_solve, torch.float32, (6, 20)),
    "assignment with spare tokens": (_solve, torch.float32, (5, 20)),
    "semi-dual": (_solve, torch.float32, (9, 20)),
}


class OnDevice(TorchDispatchMode):
    """Every operator reads and writes the device only."""

    def __torch_dispatch__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs, outputs)) if isinstance(t, Tensor)]
        assert all(tensor.is_cuda for tensor in tensors), func
        return outputs


@pytest.mark.parametrize("solver", SOLVERS)
def test_solvers_wait_for_nothing(solver):
    """Fake tensors have no values: reading one, or a shape that depends on one, raises."""
    function, dtype, rest = SOLVERS[solver]
    with FakeTensorMode():
        scores = torch.empty(G, S, E, device="cuda")
        valid = torch.empty(G, S, device="cuda", dtype=dtype)
        with OnDevice():
            outputs = function(scores, valid, *rest)
    assert outputs[0].shape == scores.shape

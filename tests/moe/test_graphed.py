"""Solvers as CUDA graphs: they never wait for the device, and a replay computes what a plain call does."""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from moe.routers import graphed
from moe.routers.affinity import _alternate
from moe.routers.graphed import MAX_GRAPHS, graphed_call, in_backward
from moe.routers.sparse_transport import _solve

G, S, E = 2, 24, 4
SOLVERS = {  # function, dtype of `valid`, arguments after it
    "sinkhorn": (_alternate, torch.bool, (20,)),
    "assignment": (_solve, torch.float32, (6, 20)),
    "assignment with spare tokens": (_solve, torch.float32, (5, 20)),
    "semi-dual": (_solve, torch.float32, (9, 20)),
}
each_solver = pytest.mark.parametrize("solver", SOLVERS)


def arguments(solver: str, tokens: int = S, seed: int = 0) -> tuple[Any, ...]:
    _, dtype, rest = SOLVERS[solver]
    scores = torch.rand(G, tokens, E, generator=torch.Generator().manual_seed(seed)).softmax(-1)
    valid = torch.ones(G, tokens)
    valid[1, tokens - seed % 3 :] = 0
    return scores.cuda(), valid.to("cuda", dtype), *rest


def assert_plain(outputs: tuple[Tensor, ...], solver: str, args: tuple[Any, ...]) -> None:
    for output, plain in zip(outputs, SOLVERS[solver][0](*args), strict=True):
        assert torch.equal(output, plain)


class OnDevice(TorchDispatchMode):
    """Every operator reads and writes the device only."""

    def __torch_dispatch__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs, outputs)) if isinstance(t, Tensor)]
        assert all(tensor.is_cuda for tensor in tensors), func
        return outputs


@each_solver
def test_solvers_wait_for_nothing(solver):
    """Fake tensors have no values: reading one, or a shape that depends on one, raises."""
    function, dtype, rest = SOLVERS[solver]
    with FakeTensorMode():
        scores = torch.empty(G, S, E, device="cuda")
        valid = torch.empty(G, S, device="cuda", dtype=dtype)
        with OnDevice():
            outputs = function(scores, valid, *rest)
    assert outputs[0].shape == scores.shape


def test_the_recomputation_of_activations_is_in_backward():
    seen = []

    def layer(x: Tensor) -> Tensor:
        seen.append(in_backward())
        return x.sin()

    checkpoint(layer, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()
    assert seen == [False, True]
    assert not in_backward()


def captured(monkeypatch: pytest.MonkeyPatch, calls: list[int]) -> list[int]:
    """Returns the signatures among `calls` that have a graph after them, on a stand-in for the device."""
    counts, graphs = Counter(), {}
    monkeypatch.setattr(graphed, "_calls", counts)
    monkeypatch.setattr(graphed, "_graphs", graphs)
    for signature in calls:
        counts[signature] += 1
        if signature not in graphs and graphed._make_room(signature):
            graphs[signature] = SimpleNamespace(replayed=SimpleNamespace(synchronize=lambda: None))
    return sorted(graphs)


def test_more_signatures_than_graphs_do_not_displace_each_other(monkeypatch):
    """The first call of a signature is plain. One more signature than there is room for stays plain, until it
    has been called more often than a captured one."""
    every = list(range(MAX_GRAPHS + 1))
    assert captured(monkeypatch, every) == []
    assert captured(monkeypatch, every * 5) == every[:-1]
    assert captured(monkeypatch, every * 5 + [MAX_GRAPHS]) == every[1:]


@pytest.mark.gpu
@each_solver
def test_replays_equal_plain_calls(solver):
    """Two shapes in turn; results of earlier calls stay what they were."""
    calls = [arguments(solver, tokens, seed) for seed in range(4) for tokens in (S, 2 * S)]
    results = [graphed_call(SOLVERS[solver][0], *args) for args in calls]
    for args, outputs in zip(calls, results, strict=True):
        assert_plain(outputs, solver, args)


@pytest.mark.gpu
def test_a_graph_of_inference_serves_training():
    with torch.inference_mode():
        for seed in range(3):
            graphed_call(_alternate, *arguments("sinkhorn", 3 * S, seed))
    args = arguments("sinkhorn", 3 * S, seed=3)
    assert_plain(graphed_call(_alternate, *args), "sinkhorn", args)


@pytest.mark.gpu
@each_solver
def test_threads_with_streams_of_their_own(solver):
    def calls(thread: int) -> list[tuple[tuple[Any, ...], tuple[Tensor, ...]]]:
        with torch.cuda.stream(torch.cuda.Stream()):
            inputs = [arguments(solver, seed=100 * thread + seed) for seed in range(50)]
            results = [(args, graphed_call(SOLVERS[solver][0], *args)) for args in inputs]
            torch.cuda.current_stream().synchronize()
        return results

    with ThreadPoolExecutor(2) as threads:
        for results in threads.map(calls, range(2)):
            for args, outputs in results:
                assert_plain(outputs, solver, args)


@pytest.mark.gpu
def test_a_capture_around_it_takes_the_plain_call():
    args = arguments("sinkhorn")
    _alternate(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = graphed_call(_alternate, *args)
    graph.replay()
    assert_plain(outputs, "sinkhorn", args)


@pytest.mark.gpu
def test_graphs_share_their_working_memory():
    """Replays in turn, by graphs of one pool, are those of plain calls, also of the graph captured first."""
    calls = [arguments("assignment", tokens, seed) for seed in range(4) for tokens in (S, 2 * S, 4 * S)]
    results = [graphed_call(_solve, *args) for args in calls]
    for args, outputs in zip(calls, results, strict=True):
        assert_plain(outputs, "assignment", args)
    assert len({graph.graph.pool() for graph in graphed._graphs.values()}) == 1


@pytest.mark.gpu
def test_few_graphs_are_kept():
    for tokens in range(S, S + 2 * MAX_GRAPHS):
        for seed in range(3):
            args = arguments("sinkhorn", tokens, seed)
            assert_plain(graphed_call(_alternate, *args), "sinkhorn", args)
    assert len(graphed._graphs) <= MAX_GRAPHS

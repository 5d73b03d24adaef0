"""Calls of a function on CUDA tensors as one launch, by a CUDA graph, which suits loops of small operators.

Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs. A graph repeats the recorded
kernels on the recorded addresses, so the function must not read a tensor's value on the host, take a shape
from it, or draw random numbers.
"""

from collections import Counter
from collections.abc import Callable
from functools import cache
from threading import RLock
from typing import Any

import torch
from torch import Tensor

# A run has a few signatures: batches of training and of evaluation, at some settings of its routers.
MAX_GRAPHS = 8


def graphed_call(function: Callable[..., tuple[Tensor, ...]], *args: Any) -> tuple[Tensor, ...]:
    """Returns function(*args), on CUDA by replaying a graph; args[0] tells the device.

    Calls share a graph if the function, the layouts of the tensors and all other arguments are equal. The
    first such call runs plainly, because a shape that never returns is not worth a capture. So does every
    call on the CPU and every call inside another capture. To be called inside an opaque operator, where
    neither autograd nor tracing (torch.compile, fake tensors) comes.
    """
    if not args[0].is_cuda:
        return function(*args)
    with _lock, torch.cuda.device(args[0].device):
        if torch.cuda.is_current_stream_capturing():
            return function(*args)
        signature = (function, torch.are_deterministic_algorithms_enabled(), *map(_layout, args))
        _calls[signature] += 1
        graph = _graphs.get(signature)
        if graph is None and not in_backward() and _make_room(signature):
            graph = _graphs[signature] = _Graph(function, args)
        return function(*args) if graph is None else graph.replay(args)


def in_backward() -> bool:
    """Returns whether autograd is computing gradients on this thread.

    A capture waits for the whole device. In a backward pass, whose recomputation of activations calls
    routers again, it would wait for collectives that another rank may not have launched yet.
    """
    return torch._C._current_graph_task_id() != -1


def _make_room(signature: Any) -> bool:
    """Returns whether a call that was counted may be captured, after dropping the least frequent graph if
    there are `MAX_GRAPHS`. Counting keeps more signatures than that, in turn, from displacing each other.
    """
    if _calls[signature] < 2:
        return False
    if len(_graphs) < MAX_GRAPHS:
        return True
    rarest = min(_graphs, key=_calls.__getitem__)
    if _calls[rarest] >= _calls[signature]:
        return False
    _graphs.pop(rarest).replayed.synchronize()
    return True


@cache
def _shared(device: int) -> tuple[Any, torch.cuda.Event]:
    """Returns the memory pool of all graphs of a device, and the event after the last replay of any.

    Graphs may share their working memory, because no replay begins before the last one has ended.
    """
    return torch.cuda.graph_pool_handle(), torch.cuda.Event()


def _layout(arg: Any) -> Any:
    return (arg.shape, arg.stride(), arg.dtype, arg.device) if isinstance(arg, Tensor) else arg


class _Graph:
    """A captured call; keeps its arguments and outputs, and shares all other memory with the other graphs."""

    # Inference tensors would refuse to be overwritten outside of inference mode.
    @torch.inference_mode(False)
    @torch.no_grad()
    def __init__(self, function: Callable[..., tuple[Tensor, ...]], args: tuple[Any, ...]) -> None:
        self.args = [arg.clone() if isinstance(arg, Tensor) else arg for arg in args]
        pool, self.replayed = _shared(torch.cuda.current_device())
        self.graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # Loads the kernels, which a capture must not do.
            function(*self.args)
        # Other threads, as those that load data, may go on allocating and copying during the capture.
        with torch.cuda.graph(self.graph, pool, stream, capture_error_mode="thread_local"):
            self.outputs = function(*self.args)

    def replay(self, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
        # The last replay of a graph, of this one or of another, may still run on another stream.
        torch.cuda.current_stream().wait_event(self.replayed)
        for own, arg in zip(self.args, args, strict=True):
            if isinstance(own, Tensor):
                own.copy_(arg)
        self.graph.replay()
        outputs = tuple(output.clone() for output in self.outputs)
        self.replayed.record()
        return outputs


# One capture at a time in a process, and one call at a time on a graph's tensors.
_lock = RLock()
_calls: Counter[Any] = Counter()
_graphs: dict[Any, _Graph] = {}

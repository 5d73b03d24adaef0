"""Measures the cost of a model in a forward pass on the meta device, where tensors have no data.

A model needs no formulas of its costs (`ModelConfig.costs`); those of other models are tested by these.
"""

from collections import defaultdict
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from moe.layer import MoELayer
from moe.model import Activations, Costs, ModelConfig


class _Operations(TorchDispatchMode):
    """Counts the multiply-adds of matmuls and convolutions under the name of the running part."""

    def __init__(self) -> None:
        super().__init__()
        self.parts, self.macs, self.largest = ["other"], defaultdict[str, float](float), 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if count := flop_registry.get(func._overloadpacket):
            macs = count(*args, **(kwargs or {}), out_val=out) / 2
            self.macs[self.parts[-1]] += macs
            self.largest = max(self.largest, macs)
        return out


class _Saved:
    """Counts the bytes that autograd keeps, once for each storage: outside of the units, and in each."""

    def __init__(self, model: nn.Module, units: int) -> None:
        self.unit, self.saved, self.widest = 0, [0.0] * (1 + units), 0.0
        self._seen = {param.untyped_storage()._cdata for param in model.parameters()}
        self._alive: list[Any] = []  # so that no address is used twice

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            self._alive.append(storage)
            size = tensor.numel() * tensor.element_size()
            self.saved[self.unit] += size
            if self.unit:
                self.widest = max(self.widest, size)
        return tensor


@cache
def trace(config: ModelConfig) -> Costs:
    """Measures one routing group in training, in float32, and divides by its images.

    Raises ValueError if the model cannot run on the meta device, as code that reads a number cannot.
    """
    count = config.images_per_group
    with torch.device("meta"):
        model = config.build(seed=None).train()
        images = config.example(count)
    units = model.units()
    operations, saved, streams = _Operations(), _Saved(model, len(units)), [0.0]

    def begin_part(name: str, module: nn.Module, inputs: Any) -> None:
        operations.parts.append(name)

    def begin_unit(index: int, module: nn.Module, inputs: Any) -> None:
        saved.unit = index

    def end_part(module: nn.Module, inputs: Any, output: Any) -> None:
        operations.parts.pop()

    def end_unit(module: nn.Module, inputs: Any, output: Any) -> None:
        saved.unit = 0
        streams.append(output[0].numel() * output[0].element_size())

    parts = [
        (name, part)
        for name, child in model.named_children()
        for part in (child if isinstance(child, nn.ModuleList) else [child])
    ]
    for layer in (module for module in model.modules() if isinstance(module, MoELayer)):
        parts += [("dispatch_combine", layer), ("router", layer.router), ("experts", layer.experts)]
        parts += [("shared", layer.shared)] if layer.shared else []
    for name, part in parts:
        part.register_forward_pre_hook(partial(begin_part, name))
        part.register_forward_hook(end_part)
    for index, unit in enumerate(units, start=1):
        unit.register_forward_pre_hook(partial(begin_unit, index))
        unit.register_forward_hook(end_unit)
    try:
        with operations, torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
            model(images)
    except (RuntimeError, NotImplementedError) as error:
        raise ValueError(
            f"a model of kind {config.kind!r} cannot run on the meta device, where its costs are measured"
            f" ({error}): give its config the method costs"
        ) from None
    kept = [size / count for size in saved.saved]
    return Costs(
        {name: macs / count for name, macs in operations.macs.items()},
        operations.largest / count,
        Activations(kept, max(streams) / count, saved.widest / count),
    )

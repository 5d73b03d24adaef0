"""The weights of one rank in bfloat16: copies that a block computes with, beside the float32 weights.

Optimisers change the float32 weights, and checkpoints hold them. A copy takes its weight's place while its
block computes, in the recomputation of activation checkpointing too, and its gradient is added to the
float32 gradient as soon as it is known. A mesh of one rank computes the same by FSDP's mixed precision, whose
hooks take longer than the kernels of a small model. Routers, and modules that say `in_float32`, keep their
float32 weights, and buffers are not rounded.
"""

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from moe.model import Model, Output, find_moe_layers

# The attribute of a model that holds its copies; they are neither parameters nor modules.
COPIES = "copies"


def compute_in(model: Model, dtype: torch.dtype) -> None:
    """Makes `model` compute with weights and images rounded to `dtype`. Its logits are float32.

    `refresh` must follow each change of the weights but those before the first forward pass. The model can be
    neither copied nor converted: build another, and load its state.
    """
    exact = {m for layer in find_moe_layers(model) for m in layer.router.modules()}
    left = [m for m in model.modules() if m not in exact and not getattr(m, "in_float32", False)]
    vars(model)[COPIES] = []
    for block in model.units():
        inside = set(block.modules())
        copies = Copies([module for module in left if module in inside], dtype)
        left = [module for module in left if module not in inside]
        block.forward = copies.used_by(block.forward)
        vars(model)[COPIES].append(copies)
    rest = Copies(left, dtype)
    vars(model)[COPIES].append(rest)
    forward = rest.used_by(model.forward)

    def in_dtype(images: Tensor, *args: Any, **kwargs: Any) -> Output:
        if not isinstance(images, Tensor) or images.is_floating_point():  # bytes of a text stay as they are
            images = images.to(dtype)
        output = forward(images, *args, **kwargs)
        return output._replace(heads={name: head.float() for name, head in output.heads.items()})

    def refuse(memo: object) -> None:
        raise TypeError("a model with rounded copies of its weights cannot be copied: build another")

    model.forward = in_dtype
    vars(model)["__deepcopy__"] = refuse


def refresh(model: nn.Module) -> None:
    """Rounds the weights of a model again, if it computes with rounded copies."""
    for copies in vars(model).get(COPIES, ()):
        copies.refresh()


class Copies:
    """Copies of the parameters that `owners` hold themselves, made when they are first used."""

    def __init__(self, owners: Iterable[nn.Module], dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._places = [(owner._parameters, n) for owner in owners for n in owner._parameters]
        self._weights: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._in_use = False

    def used_by(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `function` that finds the copies in the places of the weights."""

        @wraps(function)
        def with_copies(*args: Any, **kwargs: Any) -> Any:
            if self._in_use:
                return function(*args, **kwargs)
            if not self._copies:
                self._make()
            self._put(self._copies)
            try:
                return function(*args, **kwargs)
            finally:
                self._put(self._weights)

        return with_copies

    @torch.no_grad()
    def refresh(self) -> None:
        """Rounds the weights into the copies."""
        if self._copies:
            # One launch for many tensors; there is no public function for it.
            torch._foreach_copy_(self._copies, self._weights)  # pyright: ignore[reportPrivateImportUsage]

    @torch.inference_mode(False)
    def _make(self) -> None:
        for parameters, name in self._places:
            if (weight := parameters[name]) is not None:
                copy = nn.Parameter(weight.detach().to(self.dtype), requires_grad=weight.requires_grad)
                if weight.requires_grad:
                    copy.register_post_accumulate_grad_hook(_add_to(weight))
                self._weights.append(weight)
                self._copies.append(copy)
        self._places = [(parameters, n) for parameters, n in self._places if parameters[n] is not None]

    def _put(self, tensors: list[Any]) -> None:
        self._in_use = tensors is self._copies
        for (parameters, name), tensor in zip(self._places, tensors, strict=True):
            parameters[name] = tensor


def _add_to(weight: nn.Parameter) -> Callable[[Tensor], None]:
    """Returns a hook that moves a copy's gradient to the float32 weight, where microbatches add up."""

    def hook(copy: Tensor) -> None:
        assert copy.grad is not None
        if weight.grad is None:
            weight.grad = copy.grad.to(weight.dtype)
        else:
            weight.grad += copy.grad
        copy.grad = None

    return hook

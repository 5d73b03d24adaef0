"""Weights of one model as the start of another: a new resolution, other classes, experts from a dense model.

Source: V-MoE section 3.5, which fine-tunes at 384 pixels with a resized position embedding (``vit_zoom`` of
the authors' code); Komatsuzaki et al. 2022, "Sparse Upcycling", https://arxiv.org/abs/2212.05055.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Shapes = Mapping[str, tuple[int, ...]]  # tensor name -> shape
Rows = Sequence[int | None]  # for each output of a head here, the output there of the same class, if any

# Linear layers store (out, in), experts (E, in, out).
_MLP = {
    "w_in_EDF": "up.weight",
    "b_in_EF": "up.bias",
    "w_out_EFD": "down.weight",
    "b_out_ED": "down.bias",
}


class Conversion(NamedTuple):
    """The conversion of a tensor to another shape; its result may share memory with the source. The rows
    `new` of the result mean nothing: there the tensor stays as initialised.
    """

    source: str
    how: str
    of: Callable[[Tensor], Tensor]
    new: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """The tensors that a model ("here") takes over from another model ("there").

    Attributes:
        copied: names of tensors with equal name and shape.
        converted: name here -> conversion.
        initial: name here -> the reason why no tensor there fits.
        unused: names there that have no place here.
    """

    copied: tuple[str, ...]
    converted: Mapping[str, Conversion]
    initial: Mapping[str, str]
    unused: tuple[str, ...]


def plan_transfer(
    saved: Shapes, model: Shapes, below: str = "", head: str = "head", rows: Rows | None = None
) -> Transfer:
    """Plans which tensors are copied or converted; no others are taken over.

    Tensors of equal name and shape are copied; a position embedding of another grid is resized; if a block is
    MoE in the model and dense in the checkpoint, every expert is a copy of its MLP. If no name there begins
    with `below`, the checkpoint is that of the part of the model whose names do. With `rows` the tensors of
    the module `head` are taken over row by row; without, outputs of equal number mean the same.
    """
    if below and not any(name.startswith(below) for name in saved):
        part = {name.removeprefix(below): shape for name, shape in model.items() if name.startswith(below)}
        plan, rest = plan_transfer(saved, part), [name for name in model if not name.startswith(below)]
        same = {
            name: Conversion(name, "the whole model there", lambda tensor: tensor) for name in plan.copied
        }
        return Transfer(
            copied=(),
            converted={below + name: how for name, how in {**same, **plan.converted}.items()},
            initial={below + name: why for name, why in plan.initial.items()}
            | dict.fromkeys(rest, "not in the checkpoint"),
            unused=plan.unused,
        )
    copied, converted, initial = [], dict[str, Conversion](), dict[str, str]()
    for name, shape in model.items():
        source = name if name in saved else _mlp_of(name)
        if source not in saved:
            initial[name] = "not in the checkpoint"
        elif rows and name.startswith(f"{head}.") and _has_rows(saved[name], shape, rows):
            if list(rows) == list(range(saved[name][0])):
                copied.append(name)
            elif any(row is not None for row in rows):
                converted[name] = _by_rows(name, rows)
            else:
                initial[name] = "new, for the classes there are others"
        elif source == name and saved[name] == shape:
            copied.append(name)
        elif conversion := _conversion(name, source, saved, model):
            converted[name] = conversion
        else:
            initial[name] = f"{tuple(saved[source])} in the checkpoint, {tuple(shape)} in the model"
    used = {conversion.source for conversion in converted.values()}
    unused = tuple(name for name in saved if name not in model and name not in used)
    return Transfer(copied=tuple(copied), converted=converted, initial=initial, unused=unused)


def resize_position(position_SD: Tensor, old_grid: int, new_grid: int, *, class_token: bool) -> Tensor:
    """Resizes a position embedding to new_grid^2 patches, bilinear with aligned corners.

    The first row is kept if it belongs to a class token. Raises ValueError if there are not old_grid^2
    patches.
    """
    if len(position_SD) != old_grid**2 + class_token:
        raise ValueError(
            f"position embedding has {len(position_SD)} rows, a grid of {old_grid} x {old_grid}"
            f" {'and a class token' if class_token else 'without class token'} {old_grid**2 + class_token}"
        )
    if old_grid == new_grid:
        return position_SD
    first_SD, patches_SD = position_SD.split([int(class_token), old_grid**2])
    image_1DHW = patches_SD.T.reshape(1, -1, old_grid, old_grid)
    resized = F.interpolate(image_1DHW, size=(new_grid, new_grid), mode="bilinear", align_corners=True)
    return torch.cat([first_SD, resized.flatten(2)[0].T])


def shapes_of(state: Mapping[str, Tensor]) -> Shapes:
    """Returns the shape of each tensor."""
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def _has_rows(old: tuple[int, ...], new: tuple[int, ...], rows: Rows) -> bool:
    """Returns whether tensors of these shapes have a row for each output, there and here."""
    most = max((row for row in rows if row is not None), default=-1)
    return old[1:] == new[1:] and old[0] > most and new[0] == len(rows)


def _by_rows(name: str, rows: Rows) -> Conversion:
    new = tuple(here for here, there in enumerate(rows) if there is None)
    taken = [0 if there is None else there for there in rows]
    how = f"rows by the names of classes, {len(rows) - len(new)} of {len(rows)}"
    return Conversion(name, how, lambda tensor: tensor[taken], new)


def _mlp_of(name: str) -> str:
    """Name of the tensor in a dense block that corresponds to the experts' or the shared MLP's tensor
    `name`.
    """
    block, shared, part = name.partition(".shared.")
    if shared:
        return f"{block}.{part}"
    block, _, part = name.partition(".experts.")
    return f"{block}.{_MLP.get(part, '')}"


def _conversion(name: str, source: str, there: Shapes, here: Shapes) -> Conversion | None:
    old, new = there[source], here[name]
    if name == "position_SD":
        class_token = "class_token_D" in here
        if class_token != ("class_token_D" in there) or old[1:] != new[1:]:
            return None
        old_grid, new_grid = math.isqrt(old[0] - class_token), math.isqrt(new[0] - class_token)
        how = f"resized from {old_grid} x {old_grid} to {new_grid} x {new_grid} patches"
        resize = partial(resize_position, old_grid=old_grid, new_grid=new_grid, class_token=class_token)
        return Conversion(source, how, resize)
    return _of_mlp(name, source, there, here) if source != name else None


def _of_mlp(name: str, source: str, there: Shapes, here: Shapes) -> Conversion | None:
    """Experts of the size of an MLP are its copies. Smaller ones are slices of its hidden units: the shared
    MLP has the first, experts in turn those behind it, and each its share of the output's bias. All slices
    together are the MLP.
    """
    block, layer, kind = source.rsplit(".", 2)
    if f"{block}.up.bias" not in there or f"{block}.experts.b_in_EF" not in here:
        return None
    hidden, shared = there[f"{block}.up.bias"][0], here.get(f"{block}.shared.up.bias", (0,))[0]
    num_experts, own = here[f"{block}.experts.b_in_EF"]
    new, of_expert = here[name], ".experts." in name
    if of_expert and own == hidden:
        fits, how = there[source] == new[:0:-1], "each expert a copy of the block's MLP"
        return Conversion(source, how, lambda mlp: mlp.t().expand(new)) if fits else None
    slices, rest = divmod(hidden - shared, own)
    if rest or slices < of_expert:
        return None
    begins = [shared + own * (expert % max(slices, 1)) for expert in range(num_experts)]

    def of(mlp: Tensor, begin: int, length: int) -> Tensor:
        if (layer, kind) == ("down", "bias"):
            return mlp * (length / hidden)
        return mlp.narrow(int(layer == "down"), begin, length)

    def convert(mlp: Tensor) -> Tensor:
        if not of_expert:
            return of(mlp, 0, shared)
        return torch.stack([of(mlp, begin, own).t() for begin in begins])

    if convert(torch.empty(there[source], device="meta")).shape != torch.Size(new):
        return None
    part = f"one of {slices} slices" if of_expert else f"the first {shared} hidden units"
    return Conversion(source, f"{part} of the block's MLP", convert)

"""The state that training goes on from, as tensors by name: collected from a model, and filled into one."""

from collections.abc import Mapping, Set
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from orchestrator.checkpoint.manifest import Manifest
from orchestrator.checkpoint.tensors import Reader

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every tensor that training goes on from; references, not copies. An optimiser that has no state yet
    gets the one of before its first update."""
    weights = weights_of(model)  # first: it shards again what an evaluation left gathered
    is_new = not optimizer.state
    moments = get_optimizer_state_dict(model, optimizer, options=FLAT)
    if is_new:  # it got its state by an update without gradients, which counted as one
        for state in optimizer.state.values():
            if "step" in state:
                state["step"].zero_()
    return weights | _named("optimizer", moments)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return _named("weights", get_model_state_dict(model))


def load(
    folder: str,
    manifest: Manifest,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Fills the model, and the optimiser if there is one, in place, whatever layout wrote the checkpoint.

    Raises:
        ValueError: if tensors are missing, unknown, or of another shape or dtype; none is converted, and
            nothing was filled.
        OSError: if reading fails.
    """
    wanted = weights_of(model) if optimizer is None else state_of(model, optimizer)
    if any(name.startswith("optimizer.") for name in wanted) and not manifest.has_optimizer():
        raise ValueError(f"{folder} holds weights only: training cannot go on from it")
    reader = Reader(folder, [n for n in manifest.files if optimizer is not None or n.startswith("weights")])
    try:
        state_dict_loader.load(
            wanted,
            storage_reader=reader,
            planner=_Exactly(folder),
            process_group=group,
            no_dist=group is None,
        )
    except CheckpointException as error:  # it is no Exception, and would pass by those who wait for one
        worker, cause = first_failure(error)
        if isinstance(cause, ValueError):
            raise cause from None
        raise OSError(f"reading {folder} failed: worker {worker}: {cause!r}") from error
    set_model_state_dict(model, _of_kind("weights", wanted))
    if optimizer is not None:
        groups = get_optimizer_state_dict(model, optimizer, options=FLAT)
        moments = groups | _of_kind("optimizer", wanted)
        set_optimizer_state_dict(model, optimizer, moments, options=FLAT)


def first_failure(error: CheckpointException) -> tuple[int, BaseException]:
    """The first worker that failed, and with what; the same on every worker."""
    worker, (cause, _) = next(iter(error.failures.items()))
    return worker, cause


def _named(kind: str, values: Mapping[str, Any]) -> dict[str, Tensor]:
    return {f"{kind}.{name}": value for name, value in values.items() if isinstance(value, Tensor)}


def _of_kind(kind: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
    prefix = f"{kind}."
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


class _Exactly(DefaultLoadPlanner):
    """Checks while DCP plans: what one worker finds is then raised on all, before anything is read."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata
        _check_same(self.folder, metadata.state_dict_metadata, state_dict)
        super().set_up_planner(state_dict, metadata, is_coordinator)


def _check_same(folder: str, saved: Mapping[str, Any], wanted: Mapping[str, Tensor]) -> None:
    def weights_first(names: Set[str]) -> list[str]:
        return sorted(names, key=lambda name: (name.startswith("optimizer."), name))

    wrong = [f"{name} is not in it" for name in weights_first(wanted.keys() - saved.keys())]
    wrong += [f"{name} has no place" for name in weights_first(saved.keys() - wanted.keys())]
    for name in weights_first(wanted.keys() & saved.keys()):
        there, here = saved[name], wanted[name]
        if (tuple(there.size), there.properties.dtype) != (tuple(here.shape), here.dtype):
            wrong.append(
                f"{name} is {there.properties.dtype} {tuple(there.size)} there,"
                f" {here.dtype} {tuple(here.shape)} here"
            )
    if wrong:
        more = f"; and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise ValueError(f"{folder} is of another model: {'; '.join(wrong[:5])}{more}")

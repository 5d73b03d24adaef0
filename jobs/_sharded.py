"""Flags of workers that hold one model together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from jobs._cli import Evaluation, connect
from jobs._flags import flag
from orchestrator.errors import UsageError

if TYPE_CHECKING:
    from moe.model import Model
    from orchestrator.checkpoint.models import ModelRef
    from orchestrator.evaluation.sharded import Sharding

T = TypeVar("T")
EP = "workers that share one set of experts, as scale.ep of a training"
DTYPE = "data type of matmuls and activations of workers that hold one model together"
Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class Workers:
    """workers, for a model that one device cannot hold"""

    workers: int | None = flag(
        None, "workers that hold each model together, as in training; default: one process holds it", least=1
    )
    ep: int = flag(1, EP, least=1)
    dtype: Dtype = flag("float32", DTYPE)

    def __post_init__(self) -> None:
        for name, default in (("ep", 1), ("dtype", "float32")):
            if self.workers is None and getattr(self, name) != default:
                raise UsageError(f"--{name} {getattr(self, name)} does nothing without --workers")

    def sharding(self, models: Sequence[ModelRef], on: Evaluation) -> Sharding | None:
        """How the workers hold these models; None if one process does. Raises as `start`."""
        if self.workers is None:
            return None
        settings = {"workers": self.workers, "ep": self.ep, "dtype": self.dtype}
        return start(models, on.batch_size, root=on.places.root(), **settings)

    def measure(self, model: ModelRef, function: Callable[[Model], T], on: Evaluation) -> T:
        """Returns what a function that can be pickled finds of the loaded model."""
        from orchestrator.evaluation.evaluate import on_model

        return on_model(model, function, self.sharding([model], on), batch_size=on.batch_size)


def start(models: Sequence[ModelRef], batch_size: int, **settings: Any) -> Sharding:
    """Checks that workers can hold the models together, and starts or joins Ray. Raises UsageError if they
    cannot, or nodes do not share the storage.
    """
    from orchestrator.evaluation.sharded import Sharding
    from orchestrator.training.resources import check_shared

    sharding = Sharding(**settings)
    for model in models:
        sharding.check(model, batch_size)
    connect()
    check_shared(sharding.root)
    return sharding

"""The contract of an evaluation: what it is asked, and what it finds of trained models.

To add one, write its file and import it in `orchestrator.evaluation.kinds`, or give the file as a plugin. Its
fields are flags of `evaluate`, so import large libraries where they are used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from moe.config import Family

if TYPE_CHECKING:
    from orchestrator.checkpoint.models import ModelRef
    from orchestrator.data.batch import Batch
    from orchestrator.evaluation.sharded import Sharding
    from orchestrator.tracking.store import Tracking


@dataclass(frozen=True, kw_only=True)
class EvaluationRequest:
    """The models and images of an evaluation, and the means that it may use.

    Attributes:
        references: the models as the user names them.
        models: those models.
        split, batch_size: of the images.
        dtype: of matmuls on workers that hold a model together.
        root: the storage, where results of an interrupted evaluation may lie.
        out: the place for results, absolute; None: none is wanted.
        path, paths: return the location of the data, or of all data sets, for a model. The first raises
            UsageError for several.
        images: yields batches of a model's images: ``images(model, path, fields, split)``.
        sharding: returns how workers hold models together; None if one process does.
        measure: returns what a function that can be pickled finds of the loaded model.
        say: prints a line; `table` prints columns and rows, of which the first `left` columns are text.
        writable: returns the absolute location that a field names, by the field's name and its value. Raises
            UsageError if it cannot be written.
        keep: writes tables to the record of a sweep, by its directory.
        open_store: opens the store of the tracker.
        connect: starts or joins Ray.
    """

    references: tuple[str, ...]
    models: Sequence[ModelRef]
    split: Literal["train", "val"]
    batch_size: int
    dtype: str
    root: str
    out: str | None
    path: Callable[[ModelRef], str]
    paths: Callable[[ModelRef], tuple[str, ...]]
    images: Callable[..., Iterator[Batch]]
    sharding: Callable[[Sequence[ModelRef]], Sharding | None]
    measure: Callable[[ModelRef, Callable[..., Any]], Any]
    say: Callable[[str], None]
    table: Callable[..., None]
    writable: Callable[[str, str], str]
    keep: Callable[[str, Mapping[str, Mapping[str, Sequence[Any]]]], None]
    open_store: Callable[[], Tracking]
    connect: Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """The figures of a model, for the record of its run and for JSON.

    Attributes:
        paths: the data sets; ``{0}`` stands for the name of the first in all names.
        where: what all names begin with; empty: ``eval/{0}/KIND/SPLIT/step-N``.
        metrics, tables, files: name -> value, columns with their values, content.
        labels: tags of the run in trackers.
        report: figures for JSON; the locations of the files join them.
    """

    model: ModelRef
    paths: tuple[str, ...]
    where: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    tables: Mapping[str, Mapping[str, Sequence[Any]]] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)


class EvaluationConfig(Family, ABC, default="scores"):
    """An evaluation of trained models. Its kind is a flag that chooses it; a field of the same name is what
    follows that flag.
    """

    def folder(self) -> Sequence[str]:
        """Returns the names of files if the place for results is a folder with them; none: it is a file of
        all figures.
        """
        return ()

    @abstractmethod
    def evaluate(self, on: EvaluationRequest) -> Iterator[EvaluationResult]:
        """Evaluates the models, and yields what is to be recorded as soon as it is found.

        Raises:
            UsageError: for models or data that it cannot use; what it found before is kept.
        """


def setting(default: Any = MISSING, help: str = "", **options: str) -> Any:
    """A field with its help. `options`: ``metavar`` and ``nargs``, as argparse has them."""
    return field(default=default, metadata={"help": help, **options})

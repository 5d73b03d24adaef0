"""A suite of data sets to fine-tune on, as VTAB-1k: a TOML file with a row for each, and the choice of their
learning rates on held-out pieces of their training images.

Source: ViT, appendix B.1.1: a grid of rates on a piece of train, then a final run on all of train, with the
mean of three seeds.
"""

import re
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from moe.config import Bound, Config, NonNegativeInt, PositiveFloat, PositiveInt
from orchestrator import storage
from orchestrator.codec import override, read_config
from orchestrator.config import RunConfig
from orchestrator.data.manifest import open_manifest
from orchestrator.errors import UsageError
from orchestrator.runs.run_directory import Result
from orchestrator.sweeps.queue import Outcome
from orchestrator.sweeps.sweep import Sweep
from wings.transfer.held_out import hold_out

GEOMETRY = (
    "inception",
    "crop_flip",
    "shift",
    "crop",
    "flip",
)  # members of data.augment that crop and flip replace


@dataclass(frozen=True, kw_only=True)
class SuiteRow(Config):
    """A data set to fine-tune on. What is None is as in the run of the others.

    Attributes:
        path: of its shards.
        group: whose mean is reported, too.
        classes: their number, which the data must have.
        warmup: steps in which the rate rises.
        size: pixels of a side.
        crop, flip: whether training images are cropped to six sevenths at random, and mirrored; one that is
            None beside the other is off.
        rates: learning rates, of which the best on a held-out piece is chosen.
        held_out: fraction of the training images in this piece.
    """

    name: str
    path: str
    group: str = ""
    classes: PositiveInt | None = None
    steps: PositiveInt | None = None
    warmup: NonNegativeInt | None = None
    size: PositiveInt | None = None
    crop: bool | None = None
    flip: bool | None = None
    rates: tuple[PositiveFloat, ...] = ()
    held_out: Annotated[float, Bound(">", 0), Bound("<", 1)] = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        for field, text in (("name", self.name), ("group", self.group or "none")):
            if not re.fullmatch(r"[A-Za-z0-9][\w.+-]*", text, re.ASCII):
                raise ValueError(f"{field} must be letters, digits and . _ - +, got {text!r}")
        if len(set(self.rates)) < len(self.rates):
            raise ValueError(f"rates must be different numbers, got {list(self.rates)}")

    def changes(self) -> dict[str, Any]:
        """Returns the dotted changes of a run to this data set, at its rate if it has one."""
        changed = {
            "train.steps": self.steps,
            "train.schedule.warmup_steps": self.warmup,
            "train.lr": self.rates[0] if len(self.rates) == 1 else None,
            "model.image_size": self.size,
        }
        if (self.crop, self.flip) != (None, None):
            kept = {"crop": self.crop, "flip": self.flip}
            changed |= {f"data.augment.{kind}": {} if kept.get(kind) else "none" for kind in GEOMETRY}
        classes = len(open_manifest(self.path).classes)
        given = {field: value for field, value in changed.items() if value is not None}
        return {"data.path": self.path, "model.num_classes": classes, **given}


def read_suite(file: str, root: str | None = None, shards: Callable[[str], str] = str) -> list[SuiteRow]:
    """Reads a TOML file of ``[[rows]]``, whose fields are those of `SuiteRow`. Relative paths are below
    `root`, by default the folder of the file.

    Args:
        shards: returns the data set of a location, or raises UsageError.

    Raises:
        UsageError: naming the file, the row and the value that is refused.
    """
    file = storage.absolute(file)
    try:
        tree = tomllib.loads(storage.read_bytes(file).decode())
    except OSError as error:
        raise UsageError(f"no suite at {file}: {error}") from None
    except ValueError as error:
        raise UsageError(f"{file} is not TOML: {error}") from None
    rows = tree.pop("rows", None)
    if tree or not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        found = ", ".join(tree) or repr(rows)
        raise UsageError(f"{file}: a suite is a list of [[rows]] and nothing else, found {found}")
    root, read = root or file.rpartition("/")[0], list[SuiteRow]()
    for number, fields in enumerate(rows, start=1):
        where = f"{file}: row {number} ({fields.get('name', 'without a name')})"
        if missing := [field for field in ("name", "path") if field not in fields]:
            raise UsageError(f'{where}: it has no {missing[0]}: add {missing[0]} = ".."')
        try:
            row = read_config(SuiteRow, fields)
        except UsageError as error:
            raise UsageError(f"{where}: {error}") from None
        own = row.path.startswith("/") or "://" in row.path
        location = row.path if own else storage.join(root, row.path)
        try:
            row = replace(row, path=shards(location))
            classes = len(open_manifest(row.path).classes)
        except UsageError as error:
            raise UsageError(f"{where}: path {fields['path']!r}: {error}; or give another `root`") from None
        if row.classes not in (None, classes):
            raise UsageError(
                f"{where}: classes = {row.classes}, but {row.path} has {classes}: pack it by the labels of"
                " this suite, or correct the number"
            )
        read.append(row)
    name, times = Counter(row.name for row in read).most_common(1)[0]
    if times > 1:
        raise UsageError(f"{file}: {times} rows have the name {name!r}: names are directories, so rename one")
    return read


def rate_arm(row: SuiteRow, rate: float) -> str:
    """Returns the name of the arm that tries a rate."""
    return f"{row.name}-lr{rate:g}"


def rates_sweep(base: RunConfig, rows: Sequence[SuiteRow]) -> Sweep:
    """An arm for each data set and rate, trained on a piece of train and evaluated on another. Data sets of
    one rate have none. Raises UsageError as `hold_out` does.
    """
    arms: dict[str, dict[str, Any]] = {}
    for row in rows:
        if len(row.rates) > 1:
            try:
                piece = hold_out(row.path, base.storage, row.held_out)
            except UsageError as error:
                raise UsageError(f"row {row.name}: held_out: {error}") from None
            changes = row.changes() | {"data.path": piece}
            arms |= {rate_arm(row, rate): changes | {"train.lr": rate} for rate in row.rates}
    first = next((arm["data.path"] for arm in arms.values()), base.data.path)
    return Sweep(base=override(base, {"name": f"{base.name}-rates", "data.path": first}), arms=arms)


def with_best_rates(
    rows: Sequence[SuiteRow], outcomes: Mapping[str, Outcome], quality: str
) -> tuple[list[SuiteRow], dict[str, str]]:
    """Returns the rows with their best rate alone, the lowest of equally good ones; and why there is none, by
    the names of rows without a run that finished, or with one that failed and is to be repeated.
    """
    chosen, reasons = list[SuiteRow](), dict[str, str]()
    for row in rows:
        if len(row.rates) < 2:
            chosen.append(row)
            continue
        ends = {rate: outcomes.get(rate_arm(row, rate), "it has not been trained") for rate in row.rates}
        found = {
            rate: end.metrics[quality]
            for rate, end in ends.items()
            if isinstance(end, Result) and end.status == "finished"
        }
        if failed := {rate: end for rate, end in ends.items() if isinstance(end, str)}:
            reasons[row.name] = "; ".join(f"rate {rate:g}: {why}" for rate, why in failed.items())
        elif not found:
            reasons[row.name] = f"all rates diverged, {min(row.rates):g} too: give lower ones"
        else:
            best = max(sorted(found), key=lambda rate: found[rate])
            chosen.append(replace(row, rates=(best,)))
    return chosen, reasons

"""A function in a user's own file, which returns samples."""

from dataclasses import dataclass
from itertools import chain
from typing import ClassVar, Literal

from orchestrator.data.text import TEXT
from orchestrator.errors import UsageError
from orchestrator.packing.base import SourceConfig
from orchestrator.packing.labels import listed_labels, read_labels
from orchestrator.packing.samples import Execute, Part, Sample, Source, tabulated
from orchestrator.packing.splits import splits_of_samples
from orchestrator.plugins import error_in, function_of


@dataclass(frozen=True, kw_only=True)
class FunctionConfig(SourceConfig):
    """A function of a user's own file, which returns a `Source`, or samples with their bytes, to be split."""

    kind: Literal["function"] = "function"
    placed: ClassVar[str] = "NAME"

    @classmethod
    def place_in(cls, text: str) -> str | None:
        return text if text.partition(":")[0].endswith(".py") else None

    @classmethod
    def spelled(cls) -> str:
        return "your own FILE.py:NAME"

    def samples(self, execute: Execute) -> Source:
        source = _called(self.place, self.val_frac, self.ignore_split_names)
        with_captions = (TEXT in sample.fields for part in source.splits.values() for sample in part)
        if self.captions and not all(with_captions):
            raise UsageError(
                f"{self.place}: a sample has no captions; give each fields={{{TEXT!r}: b'a caption'}}"
            )
        return source


def _called(name: str, val_frac: float, ignore_split_names: bool) -> Source:
    try:
        found = function_of(name)()
        samples = [] if isinstance(found, Source) else list(found)
    except UsageError:
        raise
    except Exception as error:  # the user's own code
        raise error_in(name, error) from error
    if isinstance(found, Source):
        return found
    if not samples or not all(isinstance(sample, Sample) for sample in samples):
        raise UsageError(f"{name} must return a Source, or samples: Sample(image=.., label=.., key=..)")
    for sample in samples:
        if not (isinstance(sample.key, str) and isinstance(sample.image, bytes)):
            kinds = f"key={sample.key!r} and an image of {type(sample.image).__name__}"
            raise UsageError(f"{name}: a sample has {kinds}: a key is text, an image its encoded bytes")
    try:
        sets = [listed_labels([sample.label, *sample.others]) for sample in samples]
    except ValueError as error:
        raise UsageError(f"{name}: {error}") from None
    labels = read_labels(sets, [sample.key for sample in samples], name)
    # Samples with further fields need no labels.
    there = [first is not None or bool(s.fields) for first, s in zip(labels.first, samples, strict=True)]
    chosen = [row for row, has in enumerate(there) if has or not any(there)]
    images, _, keys, _, _, fields = zip(*(samples[row] for row in chosen), strict=True)
    further = {name: [each.get(name) for each in fields] for name in dict.fromkeys(chain(*fields))}
    part = Part(
        "all",
        [labels.first[row] for row in chosen],
        keys,
        [(0, len(image)) for image in images],
        images,
        others=[labels.others[row] for row in chosen] if labels.others else [],
        skipped=[f"{sample.key}: no label" for sample, has in zip(samples, there, strict=True) if not has],
        fields=further,
        hot=labels.hot,
        splits=[] if ignore_split_names else splits_of_samples(keys),
    )
    return tabulated([part], {"all": None}, val_frac, iter)

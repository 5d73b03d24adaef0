"""What a model took over from another's weights, in a few lines for the log."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile

from moe.adapt import Transfer

SHOWN = 5  # of what is listed; the rest is counted


@dataclass(frozen=True, kw_only=True)
class StartReport:
    """Attributes:
    source: the checkpoint's folder, or the file.
    step: of the source's run; None if the file does not say.
    numbers: in the tensors that were copied or converted, as they are here.
    """

    source: str
    step: int | None
    transfer: Transfer
    numbers: int

    def __str__(self) -> str:
        taken = self.transfer
        converted = {name: conversion.how for name, conversion in taken.converted.items()}
        tensors = f"{len(taken.copied)} tensors as they are, {len(converted)} converted"
        step = "" if self.step is None else f", step {self.step}"
        lines = [f"started from {self.source}{step}: {tensors}, {self.numbers:,} numbers"]
        lines += [f"  converted {line}" for line in by_reason(converted)]
        lines += [f"  as initialised {line}" for line in by_reason(taken.initial)]
        lines += [f"  not used {abridged(taken.unused)}"] if taken.unused else []
        return "\n".join(lines)


def abridged(names: Iterable[str]) -> str:
    """Names in few words: ``blocks.1,3.mlp.experts.* (4 each), head.weight``."""
    blocks_of: dict[str, list[int]] = {}
    others = []
    for name in names:
        if match := re.fullmatch(r"blocks\.(\d+)\.(.+)", name):
            blocks_of.setdefault(match[2], []).append(int(match[1]))
        else:
            others.append(name)
    tails_of: dict[tuple[int, ...], list[str]] = {}
    for tail, blocks in blocks_of.items():
        tails_of.setdefault(tuple(sorted(blocks)), []).append(tail)
    words = []
    for blocks, tails in tails_of.items():
        if len(tails) > 2:
            parts = zip(*(tail.split(".") for tail in tails), strict=False)
            common = [part[0] for part in takewhile(lambda part: len(set(part)) == 1, parts)]
            tails = [".".join([*common, f"* ({len(tails)} each)"])]
        words += [f"blocks.{_ranges(blocks)}.{tail}" for tail in tails]
    return ", ".join(_shortened(words + others))


def by_reason(reasons: Mapping[str, str]) -> list[str]:
    """Of name -> reason: the names of each reason, then the reason."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    return _shortened([f"{abridged(those)}: {reason}" for reason, those in names.items()])


def _shortened(words: list[str]) -> list[str]:
    return words if len(words) <= SHOWN else [*words[:SHOWN], f"and {len(words) - SHOWN} more"]


def _ranges(numbers: Iterable[int]) -> str:
    """``0,2-5`` of 0, 2, 3, 4, 5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    words = ["-".join(map(str, run)) for run in runs]
    return ",".join([*words[:2], "..", words[-1]] if len(words) > SHOWN else words)

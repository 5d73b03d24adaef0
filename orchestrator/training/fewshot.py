"""Few-shot accuracy of a model as it is, alone or spread over workers: all of them call it together, and all
get the same figures.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np
import torch
from torch import Tensor, nn

from moe.parallel import sum_over_ranks
from orchestrator import storage
from orchestrator.config import RunConfig
from orchestrator.data.batch import SampleLocation
from orchestrator.data.images import normalize
from orchestrator.data.loader import in_process, prefetched
from orchestrator.data.plan import Ints
from orchestrator.data.stream import Stream, in_order
from orchestrator.errors import UsageError
from orchestrator.fewshot import STRENGTHS, Features, Floats, best_strength, choose_shots
from orchestrator.recipe import FewShotConfig


@dataclass(frozen=True, kw_only=True)
class FewShotResult:
    """Attributes:
    strength: shots -> what was chosen for all data sets.
    accuracy: (data set, shots) -> of each seed.
    """

    strength: Mapping[int, float]
    accuracy: Mapping[tuple[str, int], tuple[float, ...]]

    def names(self) -> list[str]:
        """Of the data sets."""
        return list(dict.fromkeys(name for name, _ in self.accuracy))

    def mean(self, shots: int, name: str | None = None) -> float:
        """Over seeds, of one data set or all."""
        return fmean(fmean(self.accuracy[one, shots]) for one in ([name] if name else self.names()))

    def metrics(self) -> dict[str, float]:
        """As `FewShotConfig.metrics` names them: means over seeds and data sets."""
        return {f"fewshot/acc_{shots}shot": self.mean(shots) for shots in self.strength}


class FewShot:
    """The data sets of a `FewShotConfig`, read as `run` reads its own, of which this worker takes its part.

    Raises:
        UsageError: if one is not there, or not whole.
    """

    def __init__(self, run: RunConfig, config: FewShotConfig, rank: int = 0, workers: int = 1) -> None:
        self.config = config
        paths = [storage.absolute(path) for path in config.paths] or [run.data.path]
        self.sets = {
            name: _Shots(replace(run, data=replace(run.data, path=path)), config, rank, workers)
            for name, path in short_names(paths).items()
        }

    def measure(self, model: nn.Module, device: torch.device) -> FewShotResult:
        """With the strength of the best mean rank for each number of shots. Features that are not finite
        give nan.
        """
        found = {name: one.accuracies(model, device) for name, one in self.sets.items()}
        strength, accuracy = {}, {}
        for shots in self.config.shots:
            best = best_strength(np.stack([by[shots].mean(0) for by in found.values()]))
            strength[shots] = STRENGTHS[best]
            accuracy |= {(name, shots): tuple(by[shots][:, best].tolist()) for name, by in found.items()}
        return FewShotResult(strength=strength, accuracy=accuracy)


class _Shots:
    def __init__(self, run: RunConfig, config: FewShotConfig, rank: int, workers: int) -> None:
        everything = in_order(run, "train", rank, workers)
        labels = all_labels(everything)
        draws = {
            shots: [choose_shots(labels, shots=shots, seed=seed) for seed in range(config.seeds)]
            for shots in config.shots
        }
        chosen = np.unique(np.concatenate([one for drawn in draws.values() for one in drawn]))
        self.train = Selection(**vars(everything), indices=chosen)
        self.test = in_order(run, "val", rank, workers)
        self.draws = {n: [np.searchsorted(chosen, one) for one in drawn] for n, drawn in draws.items()}

    def accuracies(self, model: nn.Module, device: torch.device) -> dict[int, Floats]:
        """shots -> (seeds, strengths)."""
        train, test = (frozen_features(model, stream, device) for stream in (self.train, self.test))
        features = features_of(train, test)
        whole = np.cumsum(train.valid) - 1  # place among those that could be decoded
        return {
            shots: np.stack([features.accuracies(whole[one[train.valid[one]]]) for one in drawn])
            for shots, drawn in self.draws.items()
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class Selection(Stream):
    """Some images of a split that is read in order. Attributes:
    indices: their places in the split.
    """

    indices: Ints

    def epoch(self) -> int:
        return len(self.indices)

    def _in_order(self, positions: Ints) -> Iterator[Iterator[SampleLocation]]:
        return super()._in_order(self.indices[positions[positions < len(self.indices)]])


@dataclass(frozen=True, kw_only=True, eq=False)
class Frozen:
    """x (N, D) float32, label (N,), and which of them are images that could be decoded, in order."""

    x: np.ndarray
    label: Ints
    valid: np.ndarray


def frozen_features(model: nn.Module, stream: Stream, device: torch.device) -> Frozen:
    """What the head sees of every image, in evaluation mode. A call of all workers, each with its stream."""
    seen: list[Tensor] = []
    # a hook, for a model that is sharded gathers its weights in `forward` alone
    hook = model.get_submodule("head").register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    training, images_per_pass = model.training, stream.run.images_per_pass()
    model.eval()
    rows, places = [], []
    try:
        with torch.no_grad():
            for batch in prefetched(in_process(stream, stream.steps()), device):
                parts = zip(
                    batch.image.split(images_per_pass), batch.valid.split(images_per_pass), strict=True
                )
                for images, valid in parts:
                    model(normalize(images), valid)
                about = torch.stack([batch.label.float(), batch.valid], 1)
                rows.append(torch.cat([torch.cat(seen).float(), about], 1).cpu())
                places.append(batch.key.cpu())
                seen.clear()
    finally:
        hook.remove()
        model.train(training)
    mine = torch.cat(rows)
    whole = mine.new_zeros(len(stream.steps()) * stream.run.data.batch_size, mine.shape[1])
    whole[torch.cat(places)] = mine
    whole = sum_over_ranks(whole)[: stream.epoch()].numpy()
    return Frozen(x=whole[:, :-2], label=whole[:, -2].astype(np.int64), valid=whole[:, -1] > 0)


def features_of(train: Frozen, test: Frozen) -> Features:
    """Without the images that could not be decoded."""
    return Features(
        x_train=train.x[train.valid],
        y_train=train.label[train.valid],
        x_test=test.x[test.valid],
        y_test=test.label[test.valid],
    )


def all_labels(stream: Stream) -> Ints:
    """Of the split, in the order of its shards, each of which is opened."""
    shards = range(len(stream.data.manifest.splits[stream.split]))
    return np.concatenate([stream.data.open(stream.split, shard).labels for shard in shards])


def short_names(paths: Iterable[str]) -> dict[str, str]:
    """The last part of each path, or as many of them as tell it from the others -> the path. What directories
    and metrics may not be called becomes dashes.

    Raises:
        UsageError: for paths that differ in other characters alone.
    """
    paths = list(dict.fromkeys(path.rstrip("/") for path in paths))
    parts = {path: re.sub(r"[^A-Za-z0-9_./-]+", "-", path).split("/") for path in paths}
    names = dict[str, str]()
    for path in paths:
        length = 1
        while any(parts[path][-length:] == parts[other][-length:] for other in paths if other != path):
            length += 1
            if length > len(parts[path]):
                raise UsageError(f"{path} is too like another data set: rename it")
        name = "-".join(part for part in parts[path][-length:] if part)
        names[name.strip("-.") or "data"] = path
    return names

"""The tensors of one model among all that a trainer saved: without wrappers, prefixes and other copies.

A model is found by the name of its patch embedding, wherever that stands. What is before the name is before
the names of all tensors of that model; tensors elsewhere are of the optimiser, of heads for training, of a
text tower or of another copy, and are left out by name.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping

from orchestrator.errors import UsageError
from wings.weights.kind import WeightsKind
from wings.weights.tensors import Lazy, shortened

# What torch.compile, data-parallel training and activation checkpointing put into names, anywhere.
WRAPPER = re.compile(r"(?<![^./])(_orig_mod|module|_fsdp_wrapped_module|_checkpoint_wrapped_module)[./]")
TRAINING = re.compile(r"(opt|rngs?$|state$|sched|scaler|.*loss)")  # parts of names beside those of weights
AVERAGED = {"ema", "teacher", "averaged", "swa"}  # words in the name of a copy
COUNTER = re.compile(r"(global_)?steps?|epochs?|count|iterations?|n_averaged|num_updates|num_batches_tracked")


def pick(
    tensors: Mapping[str, Lazy], kinds: Iterable[WeightsKind], copy: str | None
) -> tuple[WeightsKind | None, dict[str, Lazy], list[str]]:
    """Returns the kind of a model, its tensors without what is before their names, and notes about what was
    left out. The kind is None, and the tensors are all, if there is no model of any kind.

    Args:
        copy: name of the model that is wanted of several, as ``student``; None: the average of the others.

    Raises:
        UsageError: if there are several, of which none is the average of the others, or no such `copy`.
    """
    plain, notes = {WRAPPER.sub("", name): lazy for name, lazy in tensors.items()}, []
    if len(plain) < len(tensors):
        raise UsageError("it has two tensors of a name, with and without what a wrapper adds")
    if wrappers := sorted({found for name in tensors for found in WRAPPER.findall(name)}):
        notes.append(f"names without {', '.join(wrappers)}")
    found = {
        match[1]: kind
        for kind in kinds
        for name in plain
        if (match := re.fullmatch(rf"((?:.*?[./])??){kind.patches}", name))
    }
    weights = {p: kind for p, kind in found.items() if not any(map(TRAINING.match, re.split("[./]", p)))}
    found = weights or found
    if not found:
        return None, plain, notes
    matrices = {
        prefix: {
            n.removeprefix(prefix): t.shape
            for n, t in plain.items()
            if n.startswith(prefix) and len(t.shape) > 1
        }
        for prefix in found
    }
    prefix = _chosen(matrices, copy)
    inner = [other for other in found if other.startswith(prefix) and other != prefix]
    picked, counters, beside = {}, [], Counter[str]()
    for name, lazy in plain.items():
        below = name.removeprefix(prefix)
        parts = re.split("[./]", below)
        apart = not name.startswith(prefix) or any(map(name.startswith, inner))
        if apart or (len(parts) > 1 and TRAINING.match(parts[0])):
            beside[_place(name, prefix)] += 1
        elif math.prod(lazy.shape) == 1 and (lazy.wrong or COUNTER.fullmatch(parts[-1])):
            counters.append(name)
        else:
            picked[below] = lazy
    others = [other.rstrip("./") or "the one without a prefix" for other in found if other != prefix]
    if prefix or others:
        rest = f", not {shortened(others)}" if others else ""
        notes.append(f"the model at {prefix.rstrip('./')!r} is taken{rest}")
    if beside:
        places = [f"{place} ({count} tensors)" if count > 1 else place for place, count in beside.items()]
        notes.append(f"left out beside it: {shortened(places)}")
    if any(re.search(r"(^|[./_])te?xt", place) for place in beside):
        notes.append("the text tower is left out: a head, if the image tower has one, gives embeddings")
    if counters:
        notes.append(f"counters left out: {shortened(counters)}")
    return found[prefix], picked, notes


def _chosen(matrices: Mapping[str, Mapping[str, tuple[int, ...]]], copy: str | None) -> str:
    """Returns the prefix of one of several models, of which the shapes are given."""
    names = {prefix: prefix.rstrip("./") for prefix in matrices}
    if copy is not None:
        fitting = [p for p, name in names.items() if copy in (name, *re.split("[./]", name))]
    else:
        fitting = [p for p, name in names.items() if AVERAGED.intersection(re.split("[./_]", name))]
        alike = all(shapes == matrices[p] for p in fitting for shapes in matrices.values())
        fitting = [*matrices] if len(matrices) == 1 else fitting if alike else []
    if len(fitting) == 1:
        return fitting[0]
    there = ", ".join(name or "one without a prefix" for name in names.values())
    asked = f"{len(fitting)} of them are called {copy!r}" if copy else "say by `copy` which of them is wanted"
    raise UsageError(f"it holds several models ({there}): {asked}")


def _place(name: str, prefix: str) -> str:
    """Returns a name up to where it leaves the prefix: ``state_dict.head`` for one beside
    ``state_dict.backbone.``.
    """
    parts, there = re.split(r"(?<=[./])", name), re.split(r"(?<=[./])", prefix)
    shared = next((i for i, (a, b) in enumerate(zip(parts, there, strict=False)) if a != b), 0)
    return "".join(parts[: shared + 1]).rstrip("./")

"""What lies at the places that a config names: data or weights that moved are the same if their digest is."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from orchestrator import storage
from orchestrator.checkpoint.files import SUFFIX
from orchestrator.checkpoint.manifest import find_checkpoint, hashed
from orchestrator.data.manifest import open_manifest
from orchestrator.errors import UsageError
from orchestrator.records import CONFIG, is_place

ChangedFields = Mapping[str, tuple[Any, Any]]  # field -> (before, now)


def contents_of(fields: Mapping[str, Any]) -> dict[str, str]:
    """Returns the digest of what lies at each place that these fields name, or fields below them: field ->
    digest. A record has that of `data.path` by itself.
    """
    named = (each for each in _leaves("", fields) if each[0] not in ("storage", "data.path"))
    places = {name: place for name, place in named if is_place(place)}
    digests = {place: digest_at(place) for place in {*places.values()}}
    return {name: digest for name, place in places.items() if (digest := digests[place])}


def recorded_at(checkpoint: str) -> dict[str, str]:
    """Returns the digests that the run of a checkpoint's folder has recorded: field -> digest."""
    with suppress(OSError, ValueError, KeyError):
        folder = checkpoint.rpartition("/checkpoints/")[0]
        record = json.loads(storage.read_bytes(storage.join(folder, CONFIG)))
        return {**record.get("contents", {}), "data.path": record["data_digest"]}
    return {}


def moved(changes: ChangedFields, contents: Mapping[str, str]) -> set[str]:
    """Returns the changed fields whose data or weights merely lie elsewhere.

    Args:
        contents: the digests of what was at the places before, by `contents_of`; where there is none, what
            lies there now counts.
    """

    def same(name: str, was: Any, now: Any) -> bool:
        known = is_place(was) and is_place(now)
        recorded = contents.get(name, "")
        return was == now or (known and digest_at(now, recorded) in {recorded or digest_at(was)} - {None})

    found = set[str]()
    for field, each in changes.items():
        before, now = (dict(_leaves(field, value)) for value in each)
        if before.keys() == now.keys() and all(same(name, before[name], now[name]) for name in now):
            found.add(field)
    return found


def digest_at(location: str, known: str = "") -> str | None:
    """Returns the digest of a data set (`known`: as of `Manifest.digest`), of a checkpoint's weights, or of a
    file of weights; None if there is none of these.
    """
    try:
        return open_manifest(location).digest(known)
    except (UsageError, OSError):
        pass
    try:
        if location.endswith(SUFFIX):
            return hashed(location).sha256
        return find_checkpoint(location, whole=False)[1].weights_digest()
    except (UsageError, OSError):
        return None


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _leaves(f"{name}.{key}" if name else str(key), each)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        yield f"{name}:", len(value)
        for number, each in enumerate(value):
            yield from _leaves(f"{name}:{number}", each)
    else:
        yield name, value

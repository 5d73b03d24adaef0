"""V-MoE's checkpoints: an index of arrays, and data files with their pieces.

Source: google-research/vmoe, `vmoe/checkpoints`: msgpack with the extension types of flax. A leaf of the
index names the shape of an array, the slices that it is cut into, and the file of each; a file holds for the
number of each leaf its pieces, flat, and their slices.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from orchestrator.errors import UsageError, reason_of

CHUNKED = "__msgpack_array_chunk_a87ca2__"
_ARRAY, _SLICES, _LEAF = 1, 6, 8  # extension types; slices are (start, stop, step) of each axis


def read_index(prefix: Path) -> dict[str, np.ndarray]:
    """Returns all arrays, by path in the tree: ``Encoder/encoder_norm/scale``.

    A training state's parameters are taken, without its optimiser.

    Raises:
        UsageError: if a file is missing, cut or damaged, or the pieces do not fill their arrays.
    """
    index = Path(f"{prefix}.index")
    try:
        return _read(prefix, index)
    except UsageError:
        raise
    except Exception as error:  # msgpack and numpy raise nearly anything for damaged files
        raise UsageError(f"{index} and its data cannot be read: {reason_of(error)}") from None


def _read(prefix: Path, index: Path) -> dict[str, np.ndarray]:
    content = msgpack.unpackb(index.read_bytes(), ext_hook=_extension, strict_map_key=False)
    if not isinstance(content, Mapping) or not {"shard_count", "index"} <= content.keys():
        raise UsageError(f"{index} is no index of V-MoE")
    leaves = dict(_leaves(content["index"]))
    if "version" not in content and any(name.startswith(("opt_state/", "params/")) for name in leaves):
        raise UsageError(f"{index} is a training state of an old version, whose order of arrays is unknown")
    numbers = {name: str(number) for number, name in enumerate(leaves)}
    wanted = [name for name in leaves if name.startswith("params/")] or [*leaves]
    count = int(content["shard_count"])
    paths = [Path(f"{prefix}.data-{shard:05d}-of-{count:05d}") for shard in range(count)]
    if lost := [path.name for path in paths if not path.is_file()]:
        raise UsageError(f"{index} lacks {', '.join(lost)}")
    arrays: dict[str, np.ndarray] = {}
    filled: dict[str, int] = dict.fromkeys(wanted, 0)
    for path in paths:
        stored = msgpack.unpackb(path.read_bytes(), ext_hook=_extension, strict_map_key=False)
        for name in wanted:
            for pieces, cut in stored.get(numbers[name], ()):
                flat = np.concatenate([np.asarray(piece).reshape(-1) for piece in pieces])
                whole = arrays.setdefault(name, np.empty(leaves[name], flat.dtype))
                where = tuple(slice(*axis) for axis in cut)
                whole[where] = flat.reshape(whole[where].shape)
                filled[name] += flat.size
    if broken := [name for name, done in filled.items() if done != math.prod(leaves[name])]:
        raise UsageError(f"{index} is not whole: {broken[0]} lacks pieces")
    return arrays


def _leaves(tree: Any, path: str = "") -> Any:
    """Yields the path and the shape of each array, in the order of their numbers: sorted at each level."""
    if not isinstance(tree, Mapping):
        yield path, tree
        return
    for key in sorted(tree):
        yield from _leaves(tree[key], f"{path}/{key}" if path else str(key))


def _extension(code: int, data: bytes) -> Any:
    if code == _ARRAY:
        shape, dtype, content = msgpack.unpackb(data, raw=False)
        if dtype == "bfloat16":
            wide = np.frombuffer(content, np.uint16).astype(np.uint32) << 16
            return wide.view(np.float32).reshape(shape)
        return np.frombuffer(content, np.dtype(dtype)).reshape(shape)
    if code == _SLICES:
        return tuple(tuple(msgpack.unpackb(axis)) for axis in msgpack.unpackb(data))
    if code == _LEAF:
        described, *_ = msgpack.unpackb(data)
        return tuple(msgpack.unpackb(described, strict_map_key=False)[0])
    return msgpack.ExtType(code, data)

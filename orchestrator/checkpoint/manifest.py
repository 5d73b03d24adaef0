"""The manifest: written last, it makes a folder a checkpoint; what it does not vouch for does not count."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from orchestrator import storage

MANIFEST = "manifest.json"
CHUNK = 16 << 20  # bytes that are read or written at once
RANDOM = "keyed: every number is a function of train.seed, the step and the image; no generator has a state"


class DamagedError(Exception):
    """The message names the files that are not as they were written."""


@dataclass(frozen=True, kw_only=True)
class File:
    sha256: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Attributes:
    step: updates that were made.
    images: place in the run's order of images, which is a function of the config: where reading goes on.
    progress: what else the run counts: seconds, its last report, its best.
    config: of the run, as `codec.to_dict` gives it.
    files: name in the folder -> what must be in it.
    """

    step: int
    images: int
    progress: Mapping[str, Any]
    config: Mapping[str, Any]
    files: Mapping[str, File]
    random: str = RANDOM

    def has_optimizer(self) -> bool:
        return any(name.startswith("optimizer") for name in self.files)

    def weights_digest(self) -> str:
        """Names the weights, whatever else lies beside them."""
        digests = sorted(file.sha256 for name, file in self.files.items() if name.startswith("weights"))
        return hashlib.sha256("".join(digests).encode()).hexdigest()

    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.bytes for file in self.files.values())


def folder_of(directory: str, step: int) -> str:
    return storage.join(directory, f"step-{step:08d}")


def step_of(folder: str) -> int | None:
    """None if it is not named as `folder_of` does."""
    match = re.fullmatch(r"step-([0-9]{8}|[1-9][0-9]{8,})", folder.rpartition("/")[2])
    return int(match[1]) if match else None


def steps(directory: str) -> list[int]:
    """Of all folders with a manifest, whole or damaged, oldest first."""
    found = [step for name in storage.names(directory) if (step := step_of(name)) is not None]
    return sorted(s for s in found if is_there(folder_of(directory, s)))


def is_there(folder: str) -> bool:
    """Whole or damaged."""
    return storage.size(storage.join(folder, MANIFEST)) is not None


def commit(folder: str, temporary: str, manifest: Manifest, *, replace: bool) -> None:
    """Makes the files in `temporary` the checkpoint `folder`: from one moment to the next, or not at all.

    On S3 files are where they stay (`temporary` is `folder`) and the manifest's appearance is that moment.

    Raises:
        FileExistsError: if there is one already, and it is not to be replaced.
        OSError: if a file was cut short on its way, or is gone: a run that took over has collected it.
    """
    for name, file in manifest.files.items():
        if (found := storage.size(storage.join(temporary, name))) != file.bytes:
            raise OSError(f"{temporary}/{name} has {found} bytes after {file.bytes} were written")
    content = encode(manifest)
    if not storage.is_local(folder):
        put = storage.write_bytes if replace else storage.write_new
        return put(storage.join(folder, MANIFEST), content)
    with storage.open_to_write(storage.join(temporary, MANIFEST)) as stream:
        stream.write(content)
    if replace:
        remove(folder)
    storage.rename_folder(temporary, folder)


def encode(manifest: Manifest) -> bytes:
    """JSON whose last member is the SHA-256 of the rest."""
    body = asdict(manifest)
    return json.dumps(body | {"sha256": _digest(body)}, indent=1).encode()


def read(folder: str) -> Manifest:
    """Raises DamagedError if it is not, byte for byte, what was written there; FileNotFoundError."""
    content = storage.read_bytes(storage.join(folder, MANIFEST))
    try:
        body = json.loads(content)
        body.pop("sha256")
        files = {name: File(**file) for name, file in body.pop("files").items()}
        manifest = Manifest(files=files, **body)
        same = encode(manifest) == content
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise DamagedError(MANIFEST) from None
    if not same:
        raise DamagedError(MANIFEST)
    if step_of(folder) not in (None, manifest.step):
        raise DamagedError(f"{MANIFEST} is of step {manifest.step}")
    return manifest


def damaged(folder: str, files: Iterable[tuple[str, File]]) -> list[str]:
    """Which of `files` are missing or not as they were written. Raises OSError if reading fails otherwise."""
    return [name for name, file in files if _found(storage.join(folder, name)) != file]


def remove(folder: str) -> None:
    """The manifest first, so that half a removal is no checkpoint."""
    storage.delete(storage.join(folder, MANIFEST))
    storage.delete(folder)


def _found(location: str) -> File | None:
    digest, size = hashlib.sha256(), 0
    try:
        with storage.open_to_read(location) as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
                size += len(chunk)
    except FileNotFoundError:
        return None
    return File(sha256=digest.hexdigest(), bytes=size)


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body).encode()).hexdigest()

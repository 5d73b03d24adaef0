"""The manifest, which is written last and makes a folder a checkpoint; the search for the newest checkpoint.

A function that takes a `group` is called by all workers of the group in the same order, and returns or raises
the same on each of them. Without a group the caller is alone.
"""

import hashlib
import json
import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist

from orchestrator import storage
from orchestrator.codec import read_config
from orchestrator.errors import UsageError
from orchestrator.tasks import TaskConfig

log = logging.getLogger(__name__)
T = TypeVar("T")
MANIFEST = "manifest.json"
NAME = re.compile(r"\w[\w.-]*", re.ASCII)  # of a file in the folder, and not of one elsewhere


class DamagedError(Exception):
    """The message names the files that are not as they were written."""


@dataclass(frozen=True, kw_only=True)
class File:
    sha256: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class CheckpointManifest:
    """The content of a checkpoint.

    step: number of updates that were made.
    images: place in the run's order of images, which is a function of the config: where reading continues.
    progress: the run's other counters: seconds, its last report, its best.
    config: the run's config, as `codec.to_dict` returns it.
    files: name in the folder -> digest and size.
    signature: the model's, as `codec.to_dict` returns it; None in checkpoints of earlier versions.
    """

    step: int
    images: int
    progress: Mapping[str, Any]
    config: Mapping[str, Any]
    files: Mapping[str, File]
    signature: Mapping[str, Any] | None = None

    def weights(self) -> list[str]:
        """Returns the names of the files that hold weights."""
        return [name for name in self.files if name.startswith("weights")]

    def has_optimizer(self) -> bool:
        return len(self.weights()) < len(self.files)

    def weights_digest(self) -> str:
        """Returns a SHA-256 of the weights, independent of the other files."""
        digests = sorted(file.sha256 for name, file in self.files.items() if name.startswith("weights"))
        return hashlib.sha256("".join(digests).encode()).hexdigest()

    def task(self) -> TaskConfig:
        return read_config(TaskConfig, self.config.get("task", {}))

    def quality(self) -> float | None:
        """Returns the quality of the run's task, if it was measured at exactly this step."""
        metrics = self.progress.get("metrics", {}) if self.progress.get("reported") == self.step else {}
        return metrics.get(self.task().quality)

    def size(self) -> int:
        """Returns the bytes of all files."""
        return sum(file.bytes for file in self.files.values())


def folder_of(directory: str, step: int) -> str:
    return storage.join(directory, f"step-{step:08d}")


def step_of(folder: str) -> int | None:
    """Returns the step that a folder of `folder_of` is named after; None for any other name."""
    match = re.fullmatch(r"step-([0-9]{8}|[1-9][0-9]{8,})", folder.rpartition("/")[2])
    return int(match[1]) if match else None


def steps(directory: str) -> list[int]:
    """Returns the steps of all folders with a manifest, whole or damaged, oldest first."""
    found = [step for name in storage.names(directory) if (step := step_of(name)) is not None]
    return sorted(s for s in found if is_there(folder_of(directory, s)))


def is_there(folder: str) -> bool:
    """Returns whether the folder is a checkpoint, whole or damaged."""
    return storage.size(storage.join(folder, MANIFEST)) is not None


def commit(folder: str, attempt: str, manifest: CheckpointManifest, *, replace: bool) -> None:
    """Makes the files in `attempt` the checkpoint `folder`: in one moment, or not at all.

    In an object storage the files stay where they are (`attempt` is `folder`), and the manifest's appearance
    is that moment.

    Raises:
        FileExistsError: if there is a checkpoint already, and it is not to be replaced.
        OSError: if a file was cut short on its way, or was removed by another run that took over.
    """
    for name, file in manifest.files.items():
        if (found := storage.size(storage.join(attempt, name))) != file.bytes:
            raise OSError(f"{attempt}/{name} has {found} bytes after {file.bytes} were written")
    content = encode(manifest)
    if not storage.is_local(folder):
        put = storage.write_bytes if replace else storage.write_new
        return put(storage.join(folder, MANIFEST), content)
    with storage.open_to_write(storage.join(attempt, MANIFEST)) as stream:
        stream.write(content)
    if replace:
        remove(folder)
    storage.rename_folder(attempt, folder)


def encode(manifest: CheckpointManifest) -> bytes:
    """Returns JSON whose last member is the SHA-256 of the rest."""
    body = asdict(manifest)
    if manifest.signature is None:
        del body["signature"]
    digest = hashlib.sha256(json.dumps(body).encode()).hexdigest()
    return json.dumps(body | {"sha256": digest}, indent=1).encode()


def read(folder: str) -> CheckpointManifest:
    """Reads a checkpoint's manifest.

    Raises:
        DamagedError: if it differs in any byte from what was written, or names files outside of its folder.
        FileNotFoundError: if there is none.
    """
    content = storage.read_bytes(storage.join(folder, MANIFEST))
    try:
        body = json.loads(content)
        body.pop("sha256")
        files = {name: File(**file) for name, file in body.pop("files").items()}
        manifest = CheckpointManifest(files=files, **body)
        same = encode(manifest) == content
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise DamagedError(MANIFEST) from None
    if not same:
        raise DamagedError(MANIFEST)
    if elsewhere := [name for name in manifest.files if not NAME.fullmatch(name)]:
        raise DamagedError(f"{MANIFEST} names a file outside of its folder: {elsewhere[0]}")
    if step_of(folder) not in (None, manifest.step):
        raise DamagedError(f"{MANIFEST} is of step {manifest.step}")
    return manifest


def read_or_none(folder: str) -> CheckpointManifest | None:
    """Returns a checkpoint's manifest; None if it is missing or damaged."""
    try:
        return read(folder)
    except (DamagedError, FileNotFoundError):
        return None


def newest_readable(directory: str) -> CheckpointManifest | None:
    """Returns the manifest of the newest checkpoint that has one, whether or not its files are whole."""
    folders = (folder_of(directory, step) for step in reversed(steps(directory)))
    return next(filter(None, map(read_or_none, folders)), None)


def quality_of(directory: str, step: int) -> float | None:
    """Returns the task's quality, if it was measured at exactly this step and the manifest can be read."""
    manifest = read_or_none(folder_of(directory, step))
    return manifest and manifest.quality()


def best_checkpoint(directory: str) -> tuple[int, float] | None:
    """Returns the step and the quality of the best checkpoint that there is, the earliest of equal ones; None
    if none has a finite quality."""
    qualities = {step: quality_of(directory, step) for step in steps(directory)}
    finite = [(q, -step) for step, q in qualities.items() if q is not None and math.isfinite(q)]
    return (-max(finite)[1], max(finite)[0]) if finite else None


def hashed(location: str) -> File:
    """Returns a file's digest and size. Raises FileNotFoundError."""
    digest, size = hashlib.sha256(), 0
    for piece in storage.pieces(location):
        digest.update(piece)
        size += len(piece)
    return File(sha256=digest.hexdigest(), bytes=size)


def is_whole(location: str, file: File) -> bool:
    """Returns whether a file is there and is as it was written. Raises OSError if reading fails."""
    try:
        return hashed(location) == file
    except FileNotFoundError:
        return False


def list_damaged(folder: str, files: Iterable[tuple[str, File]]) -> list[str]:
    """Returns the names of the files that are missing or differ. Raises OSError if reading fails."""
    return [name for name, file in files if not is_whole(storage.join(folder, name), file)]


def remove(folder: str) -> None:
    """Removes a checkpoint, the manifest first, so that half a removal is not a checkpoint."""
    storage.delete(storage.join(folder, MANIFEST))
    storage.delete(folder)


def find_checkpoint(
    location: str, group: dist.ProcessGroup | None = None, *, whole: bool = True
) -> tuple[str, CheckpointManifest]:
    """Returns the checkpoint that `location` names, and its manifest: the folder itself, or the newest
    checkpoint with whole weights in a directory of checkpoints.

    whole: hash the weights; without, only the manifest is read.

    Raises:
        UsageError: if the folder is damaged.
        FileNotFoundError: if the directory holds no whole checkpoint.
    """

    def checked(folder: str) -> CheckpointManifest:
        return (
            verify_checkpoint(folder, group, weights_only=True)
            if whole
            else on_first_rank(lambda: read(folder), group)
        )

    if not on_first_rank(lambda: is_there(location), group):
        return newest(location, group, checked)
    try:
        return location, checked(location)
    except DamagedError as error:
        raise damaged_error(location, error) from None


def damaged_error(folder: str, error: DamagedError) -> UsageError:
    return UsageError(f"checkpoint {folder} is damaged: {error}")


def newest(
    directory: str,
    group: dist.ProcessGroup | None = None,
    check: Callable[[str], CheckpointManifest] | None = None,
) -> tuple[str, CheckpointManifest]:
    """Returns the folder of the newest whole checkpoint, and its manifest. Damaged checkpoints are named in a
    warning.

    check: takes a folder, and returns its manifest or raises DamagedError; by default `verify_checkpoint`.

    Raises:
        FileNotFoundError: if there is none.
        OSError: if storage does not answer, which is not damage.
    """
    for step in reversed(on_first_rank(lambda: steps(directory), group)):
        folder = folder_of(directory, step)
        try:
            return folder, (check or partial(verify_checkpoint, group=group))(folder)
        # FileNotFoundError: the run that is being trained has removed the checkpoint meanwhile
        except (DamagedError, FileNotFoundError) as error:
            if rank_in(group) == 0:
                log.warning("checkpoint %s is damaged (%s); trying the one before", folder, error)
    raise FileNotFoundError(f"{directory} holds no whole checkpoint")


def verify_checkpoint(
    folder: str, group: dist.ProcessGroup | None = None, *, weights_only: bool = False
) -> CheckpointManifest:
    """Returns the manifest, after every file, or every file of weights, was hashed. Each worker hashes its
    share.

    Raises:
        DamagedError: naming the files that differ from what was written.
        FileNotFoundError: if there is no manifest.
    """
    manifest = on_first_rank(lambda: read(folder), group)
    check_files(folder, manifest.weights() if weights_only else manifest.files, manifest, group)
    return manifest


def check_files(
    folder: str, names: Iterable[str], manifest: CheckpointManifest, group: dist.ProcessGroup | None = None
) -> None:
    """Hashes these files; each worker hashes its share. Raises DamagedError, naming the files that differ."""
    files = [(name, manifest.files[name]) for name in sorted(names)]
    workers = dist.get_world_size(group) if group else 1
    per_worker = on_every_rank(lambda: list_damaged(folder, files[rank_in(group) :: workers]), group)
    if bad := sorted(name for names in per_worker for name in names):
        raise DamagedError(", ".join(bad))


def on_first_rank(ask: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """Runs `ask` on the first worker; every worker gets its result or its error."""
    return on_every_rank(lambda: ask() if rank_in(group) == 0 else None, group)[0]  # pyright: ignore[reportReturnType]


def on_every_rank(ask: Callable[[], T], group: dist.ProcessGroup | None) -> list[T]:
    """Runs `ask` on every worker and returns all answers. An error on one worker is raised on all, so that no
    worker waits for one that stopped.
    """
    answer: T | Exception
    try:
        answer = ask()
    except Exception as error:
        if group is None:
            raise
        answer = error
    answers: list[T | Exception] = [answer]
    if group:
        answers = [answer] * dist.get_world_size(group)
        dist.all_gather_object(answers, answer, group=group)
    for found in answers:
        if isinstance(found, Exception):
            raise found
    return answers  # pyright: ignore[reportReturnType]


def rank_in(group: dist.ProcessGroup | None) -> int:
    return dist.get_rank(group) if group else 0

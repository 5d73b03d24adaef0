"""Code that all commands share: the first line, errors, signals, tables, and locations of files.

`--help` and wrong flags are answered at once, so large libraries are imported inside functions.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, is_dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO
from uuid import uuid4

from jobs import _signals
from jobs._flags import PLUGIN, flag
from orchestrator.errors import BudgetExhausted, UsageError
from orchestrator.output import UnfailingOutput, protect_streams, redact_uri

if TYPE_CHECKING:
    from orchestrator.checkpoint.models import ModelRef
    from orchestrator.data.batch import Batch
    from orchestrator.data.fields import Field
    from orchestrator.tracking.store import Tracking

OUT_OF_BUDGET = 3  # exit code
UNSENT = 4  # exit code: everything is done, but a tracker lacks results
WORTH_A_CLUSTER = 8  # tasks: starting Ray takes longer than packing or indexing a few shards
FLAGS = {"hours": "budget-hours", "usd": "budget-usd", "retrain": "confirm"}  # that have another name


@contextmanager
def command(
    doing: str,
    places: Places | None = None,
    *,
    plugins: Sequence[str] = (),
    grace: float | None = None,
    to: TextIO | None = None,
) -> Iterator[None]:
    """Prints what begins, before libraries are loaded; turns a user's mistake into one line and exit code 1
    (`OUT_OF_BUDGET` if a larger budget is all that is missing), and a signal into exit code 128 + its number:
    130 for Ctrl-C, 143 for SIGTERM.

    What trains saves first, within `grace` seconds; a second signal ends the process at once. Output that
    cannot be written is dropped, and never decides the exit code.

    Args:
        places: where the command will write. A local storage is tried first, because that needs no large
            library.
        plugins: files to load, if `places` does not name them.
    """
    protect_streams()
    print(f"{doing}: loading libraries ..", flush=True, file=to and UnfailingOutput(to))
    logging.basicConfig(format="%(message)s")
    logging.getLogger("orchestrator").setLevel(logging.INFO)
    before = _signals.handlers()
    _signals.install(grace or _signals.default_grace_s())
    try:
        if places:
            places.check_local()
        if plugins := plugins or (places.plugin if places else ()):
            from orchestrator.plugins import load_plugins

            load_plugins(plugins)
        yield
    except BudgetExhausted as error:
        print(f"error: {with_flags(str(error))}", file=sys.stderr)
        sys.exit(OUT_OF_BUDGET)
    except Exception as error:
        if not _can_be_corrected(error):
            raise
        sys.exit(f"error: {with_flags(str(error))}")
    except KeyboardInterrupt as interrupt:
        saved = f": {interrupt}" if str(interrupt) else ""
        print(f"Interrupted{saved}. Run the same command again to continue.", file=sys.stderr, flush=True)
        sys.stdout.flush()
        # Libraries would take seconds to release what ends with this process anyway.
        os._exit(_signals.exit_code())
    finally:
        _signals.restore(before)


def _can_be_corrected(error: Exception) -> bool:
    """Whether the user can correct the error, which then is a line: of usage, of files and connections, of
    MLflow, or of a config that refused a value.
    """
    if isinstance(error, (UsageError, OSError)) or type(error).__name__ == "MlflowException":
        return True
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    made = (each.f_locals.get("self") for each in frames if each.f_code.co_name == "__post_init__")
    return isinstance(error, ValueError) and any(map(is_dataclass, made))


def with_flags(message: str) -> str:
    """Names settings as the command line does: the library's `fresh` or `mode=fresh` becomes --fresh."""

    def flag_of(setting: re.Match[str]) -> str:
        return "--" + FLAGS.get(setting[1], setting[1]).replace("_", "-")

    return re.sub(r"`(?:mode=)?(\w+)`", flag_of, message)


def connect() -> None:
    """Joins the cluster of $RAY_ADDRESS or of this machine, else starts a cluster here; once in a process."""
    import ray

    from orchestrator.training import cluster

    if not ray.is_initialized():
        cluster.connect(partial(print, flush=True))
        # Ray has replaced the handlers by its own.
        _signals.install()


def on_cluster(work: Callable[[Any], Any], tasks: Sequence[Any]) -> Iterator[Any]:
    """Yields the result of `work` for each task, on any free CPU of the cluster; a few run here."""
    if len(tasks) < WORTH_A_CLUSTER:
        yield from map(work, tasks)
        return

    from ray import cloudpickle

    from orchestrator.data.ray_data import map_tasks
    from orchestrator.plugins import modules_by_value

    connect()
    for module in modules_by_value():
        cloudpickle.register_pickle_by_value(module)
    yield from map_tasks(work, tasks)


def source_labels() -> dict[str, str]:
    """The command, without passwords, and the commit of its code, under MLflow's names."""
    words = " ".join([sys.argv[0], shlex.join(map(redact_uri, sys.argv[1:]))])
    labels = {"mlflow.source.name": words.rstrip(), "mlflow.source.type": "LOCAL"}
    # An environment may lie in a repository of the user's own, which does not have this file.
    file = Path(__file__)
    git = ["git", "-C", str(file.parent), "rev-parse", "HEAD", f"HEAD:./{file.name}"]
    with suppress(OSError):  # git may not be installed
        done = subprocess.run(git, capture_output=True, text=True)
        if done.returncode == 0:
            labels["mlflow.source.git.commit"] = done.stdout.split()[0]
    return labels


def named(models: Sequence[str]) -> str:
    """Models as the first line of a command names them."""
    return ", ".join(models[:3]) + (f" and {len(models) - 3} more" if len(models) > 3 else "")


def failed(reasons: dict[str, str]) -> str:
    """The error of a command whose runs failed, for these reasons."""
    listed = "\n".join(f"  {name}: {with_flags(reason)}" for name, reason in reasons.items())
    return f"error: {len(reasons)} runs failed:\n{listed}"


def exit_if_unsent(directory: str) -> None:
    """Ends the command with `UNSENT` if a tracker did not take all results, which a line has said."""
    from orchestrator.tracking.base import unsent

    if unsent(directory):
        sys.exit(UNSENT)


def print_table(
    columns: Iterable[str], rows: Iterable[Sequence[Any]], *, title: str = "", left: int = 1
) -> None:
    """Prints a table whose first `left` columns are text, and whose others are numbers. An empty row draws a
    line.
    """
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title or None)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < left else "right", overflow="fold")
    for row in rows:
        if row:
            table.add_row(*(f"{cell:.4f}" if isinstance(cell, float) else str(cell) for cell in row))
        else:
            table.add_section()
    Console(width=None if sys.stdout.isatty() else 150).print(table)


@dataclass(frozen=True, kw_only=True)
class Storage:
    """place of files"""

    storage: str | None = flag(None, "root of all files; default: $MOE_FRONTIER_HOME, else ~/moe-frontier")

    def root(self) -> str:
        """The directory or URI of all files of this user, absolute, the same for every process.

        Raises:
            UsageError: for a folder of Ray's copy of the code, which is deleted with the job.
        """
        from orchestrator import storage

        found = storage.home(self.storage)
        if "working_dir_files" in found.split("/"):
            raise UsageError(
                f"--storage {found} of a submitted job is deleted with the job: name an absolute path"
            )
        return found

    def below(self, *names: str) -> str:
        return "/".join([self.root(), *names])

    def check_local(self) -> None:
        """Raises UsageError if the root is on this machine and nothing can be written below it."""
        from orchestrator import storage

        if storage.is_local(self.root()):
            self.check_writable()

    def check_writable(self) -> None:
        """Raises UsageError if nothing can be written below the root."""
        check_writable("--storage" if self.storage else "$MOE_FRONTIER_HOME", self.root())

    def shards(self, data: str) -> str:
        """The location of shards; tars and parquet files of other projects are indexed first."""
        from orchestrator import storage
        from orchestrator.data.manifest import has_manifest
        from orchestrator.packing.in_place import index_external_shards

        path = storage.absolute(data)
        return path if has_manifest(path) else index_external_shards(path, self.root(), execute=on_cluster)


@dataclass(frozen=True, kw_only=True)
class Places(Storage):
    """places of files, MLflow runs and code of your own"""

    tracking_uri: str | None = flag(
        None, "MLflow store; default: $MLFLOW_TRACKING_URI, else mlflow.db below the storage"
    )
    experiment: str | None = flag(
        None, "MLflow experiment; default: $MLFLOW_EXPERIMENT_NAME, else moe-frontier"
    )
    plugin: tuple[str, ...] = PLUGIN

    def uri(self) -> str:
        """The URI of the MLflow store. Raises UsageError if the storage cannot hold one."""
        from orchestrator.tracking.store import store_uri

        return store_uri(self.root(), self.tracking_uri)

    def open_store(self) -> Tracking:
        from orchestrator.tracking.lost import open_store

        self.check_local()
        return open_store(self.root(), self.tracking_uri, self.experiment)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """images for the evaluation"""

    data: tuple[str, ...] = flag(
        (), "shards, as for training; default: the shards that the model was trained on"
    )
    split: Literal["train", "val"] = flag("val", "split of the images")
    batch_size: int = flag(64, "images per forward pass", least=1)
    places: Places

    def paths(self, model: ModelRef) -> tuple[str, ...]:
        """The locations of the images for a model."""
        return tuple(map(self.places.shards, self.data)) or (model.run.data.path,)

    def path(self, model: ModelRef) -> str:
        """The location of the images for a model. Raises UsageError for several data sets."""
        if len(self.data) > 1:
            raise UsageError(f"{len(self.data)} times --data: this takes one data set")
        return self.paths(model)[0]

    def images(
        self,
        model: ModelRef,
        path: str,
        fields: Mapping[str, Field] | None = None,
        split: Literal["train", "val"] | None = None,
    ) -> Iterator[Batch]:
        """The images of `split`, by default that of the flags, with `fields`, by default the task's."""
        from orchestrator.evaluation.evaluate import default_device, images_of

        split, size, device = split or self.split, self.batch_size, default_device()
        return images_of(model, path=path, split=split, batch_size=size, device=device, fields=fields)


def models_of(references: Iterable[str], places: Places) -> list[ModelRef]:
    """The models of several references, each model once. Raises UsageError for a model that is missing."""
    from orchestrator.evaluation.models import find_models

    root, uri = places.root(), places.tracking_uri
    models = [m for name in references for m in find_models(name, root=root, tracking_uri=uri)]
    return list({model.location: model for model in models}.values())


def model_of(reference: str, places: Places) -> ModelRef:
    """Raises UsageError for a model that is missing, and for several models."""
    models = models_of([reference], places)
    if len(models) > 1:
        raise UsageError(f"{reference} names {len(models)} models, but this command takes one")
    return models[0]


def check_writable(flag: str, location: str) -> None:
    """Raises UsageError, naming the flag, if nothing can be written at `location`."""
    from orchestrator import storage

    probe = storage.join(location, f".writable-{uuid4().hex}")
    try:
        storage.make_folder(location)
        storage.write_bytes(probe, b"")
        storage.delete(probe)
    except UsageError as error:
        raise UsageError(f"{flag} {location} cannot be used: {error}") from None
    except OSError as error:
        raise UsageError(f"{flag} {location} cannot be written to: {error.strerror or error}") from None


def check_file(flag: str, location: str) -> None:
    """Raises UsageError, naming the flag, if `location` lies in a run, a sweep, a data set or predictions, or
    cannot be written.
    """
    folder = location.rpartition("/")[0]
    above = folder
    while above.rpartition("://")[2].strip("/"):
        if results := _results_in(above):
            raise UsageError(f"{flag} {location}: {above} holds {results}, choose another place")
        above = above.rpartition("/")[0]
    check_writable(flag, folder)


def _results_in(folder: str) -> str:
    """Names the kind of results in `folder`, e.g. "a run or a sweep"; empty for files of other programs."""
    from orchestrator import storage
    from orchestrator.data.manifest import open_manifest
    from orchestrator.runs.run_directory import kind_of

    if kind_of(folder):
        return "a run or a sweep"
    if storage.size(storage.join(folder, "_plan.json")) is not None:
        return "predictions"
    try:
        # Other projects have files named manifest.json too.
        open_manifest(folder)
    except UsageError:
        return ""
    return "a data set"


def check_out(out: str, *, own: Iterable[str], apart: Iterable[str] = ()) -> None:
    """Checks the folder that results go to.

    Args:
        own: names of files; a folder with earlier results of the command has at least one of them.
        apart: folders of sources, which results must neither lie in nor contain.

    Raises:
        UsageError: if the folder overlaps with a source, holds other files, or cannot be written to.
    """
    from orchestrator import storage

    for source in (place.rstrip("/") for place in apart):
        if f"{out}/".startswith(f"{source}/") or f"{source}/".startswith(f"{out}/"):
            raise UsageError(f"--out {out} and the source {source} lie in each other: choose another --out")
    there = storage.names(out)
    if there and not set(own) & set(there):
        listed = ", ".join(sorted(there)[:3]) + (f" and {len(there) - 3} others" if len(there) > 3 else "")
        raise UsageError(f"--out {out} holds other files ({listed}): choose a new or an empty folder")
    made = storage.is_local(out) and not os.path.exists(out)
    check_writable("--out", out)
    if made:  # a command that fails leaves no empty folder
        with suppress(OSError):  # another has begun to write there meanwhile
            os.rmdir(out)

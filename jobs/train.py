"""Train one model, on one process or many.

  python jobs/train.py --name soft --set model.moe.router.kind=soft --set train.steps=300
  python jobs/train.py --name soft-ep2 --workers 2 --ep 2 --set model.moe.router.kind=soft
  python jobs/train.py --data s3://bucket/shards --set model.image_size=224 ..

The same command again continues from the last checkpoint, or says that the run is complete. Exit code 1 if
the run failed, or diverged: its loss was not finite any more.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jobs._cli import Places, command, connect, source_labels
from jobs._flags import MODEL, assignment, flag, parse, run_name
from orchestrator.errors import UsageError, reason_of

if TYPE_CHECKING:
    from orchestrator.config import RunConfig


@dataclass(frozen=True, kw_only=True)
class RunFlags:
    """the run, or all runs of a sweep"""

    name: str | None = flag(None, "name of the directory and of the MLflow run", read=run_name)
    data: str | None = flag(
        None,
        "directory or URI of shards, or of WebDataset tars or parquet files of other projects; default: the"
        " digits, packed below the storage",
    )
    init_from: str | None = flag(None, f"start from the weights of {MODEL}", metavar="MODEL")
    workers: int | None = flag(None, "processes that train one model together (scale.workers)")
    ep: str | None = flag(None, "number of workers that share one set of experts, or auto (scale.ep)")
    profile: int | None = flag(
        None, "write where the time of a step goes as an artifact (scale.profile_steps)", metavar="STEPS"
    )
    seed: int | None = flag(None, "seed of weights and order (train.seed)")
    set: tuple[tuple[str, Any], ...] = flag(
        (),
        "any field, e.g. train.lr=3e-4 (repeatable); --set help lists all fields and their defaults",
        metavar="FIELD=VALUE",
        read=assignment,
        nargs="+",
    )
    verify: bool = flag(False, "read all shards and check their SHA-256 before training")
    resume: bool = flag(False, "insist on continuing an earlier run")
    fresh: bool = flag(False, "move an earlier run aside and start over")
    places: Places

    def __post_init__(self) -> None:
        if self.resume and self.fresh:
            raise UsageError("--resume and --fresh exclude each other")

    def mode(self) -> str:
        return "resume" if self.resume else "fresh" if self.fresh else "auto"

    def asks_for_fields(self) -> bool:
        return any(field == "help" for field, _ in self.set)

    def config(self, base: RunConfig) -> RunConfig:
        """`base` with the changes of the flags. The data decide the number of classes, unless it is set."""
        from orchestrator.codec import override
        from orchestrator.data.manifest import open_manifest
        from orchestrator.sweeps import driver

        try:
            name = run_name(self.name or base.name)
        except UsageError as error:  # a sweep of the user's own
            raise UsageError(f"name {error}") from None
        assigned = dict(self.set)
        used = {
            "name": "--name",
            "storage": "--storage",
            "data.path": "--data",
            "train.init_from": "--init-from",
        }
        for field, instead in used.items():
            if field in assigned:
                raise UsageError(f"--set {field}: use {instead}")
        # Bad places are refused before the digits are packed.
        self.places.uri()
        self.places.check_writable()
        root = self.places.root()
        path = self.places.shards(self.data) if self.data else driver.digits(root)
        changes: dict[str, Any] = {
            "name": name,
            "storage": root,
            "data.path": path,
            "model.num_classes": len(open_manifest(path).classes),
        }
        optional = {
            "scale.workers": self.workers,
            "scale.ep": self.ep,
            "scale.profile_steps": self.profile,
            "train.seed": self.seed,
            "train.init_from": None if self.init_from is None else self._weights(self.init_from, name),
        }
        changes |= {field: value for field, value in optional.items() if value is not None}
        return override(base, changes | assigned)

    def _weights(self, model: str, name: str) -> str:
        """The location of the weights that --init-from names.

        The weights of a path may be gone if the run has begun from them: they are not needed any more.

        Raises:
            UsageError: if there is no such model.
        """
        from orchestrator import storage
        from orchestrator.checkpoint import manifest
        from orchestrator.evaluation.models import model_location
        from orchestrator.training.run_directory import read_run

        directory = self.places.below(name)
        try:
            return model_location(model, root=self.places.root(), tracking_uri=self.places.uri())
        except UsageError as error:
            if manifest.steps(f"{directory}/checkpoints"):
                record = read_run(directory)
                began = record.config["train"]["init_from"] if record else None
                for place in (storage.absolute(model), self.places.below(model)):
                    if began in (place, f"{place}/checkpoints"):
                        return began
            raise UsageError(f"--init-from {model}: {error}") from None


def print_fields(base: RunConfig) -> None:
    """Prints every field that --set knows, with its default."""
    from orchestrator.codec import describe

    print("fields for --set and their defaults here (of several kinds, one is active):")
    print("\n".join(f"  {line}" for line in describe(base)))


def main() -> None:
    flags = parse(RunFlags, __doc__)
    with command("train: fields" if flags.asks_for_fields() else f"training {flags.name or 'train'}"):
        train(flags)


def train(flags: RunFlags) -> None:
    from jobs._progress import StepLines, describe_data, describe_model
    from orchestrator.config import RunConfig
    from orchestrator.sweeps import driver
    from orchestrator.training.fit import check_data
    from orchestrator.training.resources import is_inline
    from orchestrator.training.run_directory import run_directory

    if flags.asks_for_fields():
        return print_fields(RunConfig())
    run = flags.config(RunConfig())
    check_data(run, verify=flags.verify)
    print(f"{run.name}: {describe_model(run.model)}, {describe_data(run)}", flush=True)
    if not is_inline(run):
        connect()
        print(f"starting {run.scale.workers} workers, which load libraries first ..", flush=True)
    store, lines = flags.places.open_store(), StepLines(run)
    try:
        result = driver.train(run, mode=flags.mode(), report=lines.show, store=store, labels=source_labels())
    except UsageError:
        raise
    except Exception as error:
        sys.exit(f"error: {run.name} failed: {reason_of(error)}")
    ended = "is complete: finished" if result.status == "finished" else result.status
    print(f"{run.name} {ended} after {result.step} steps, files in {run_directory(run)}")
    for name, value in sorted(result.metrics.items()):
        print(f"  {name:28} {value:.6g}")
    if result.status == "diverged":
        loss = result.metrics["train/loss"]
        sys.exit(f"error: {run.name} diverged: train/loss is {loss} at step {result.step}")


if __name__ == "__main__":
    main()

"""Train one model, on one process or many.

  python jobs/train.py --name soft --set model.moe.router.kind=soft --set train.steps=300
  python jobs/train.py --name soft-ep2 --workers 2 --ep 2 --set model.moe.router.kind=soft
  python jobs/train.py --data s3://bucket/shards --model soft-S/14-256e
  python jobs/train.py --list

Run the same command again to continue from the last checkpoint. The exit code is 1 if the run failed, or
diverged: its loss or its weights were no longer finite.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from jobs._cli import Places, command, connect, exit_if_unsent, source_labels
from jobs._flags import GRACE, MODEL, assignment, flag, parse
from orchestrator.errors import UsageError, reason_of
from orchestrator.names import run_name

if TYPE_CHECKING:
    from moe.model import ModelConfig
    from orchestrator.config import RunConfig
    from orchestrator.tracking.base import TrackerConfig


@dataclass(frozen=True, kw_only=True)
class RunFlags:
    """the run, or all runs of a sweep"""

    name: str | None = flag(None, "name of the directory and of the MLflow run", read=run_name)
    data: str | None = flag(
        None,
        "directory or URI of shards, or of WebDataset tars or parquet files of other projects, whose classes"
        " become the model's; default: digits that come with the project, packed below the storage",
    )
    model: str | None = flag(
        None,
        "the model of this name, e.g. soft-S/14-256e, as --set model=NAME; further --set change it;"
        " --list shows all",
        metavar="NAME",
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
    config: str | None = flag(
        None,
        "TOML file with fields as --set has them, such as the config.toml of a run; other flags win",
        metavar="FILE",
    )
    list: bool = flag(False, "print the models, sweeps and scales by name, and exit")
    verify: bool = flag(False, "read all shards and check their SHA-256 before training")
    resume: bool = flag(False, "fail if there is no earlier run to continue")
    fresh: bool = flag(False, "move an earlier run aside and start over")
    tracker: tuple[str, ...] = flag(
        (),
        "also show it in this tracker: tensorboard, or the kind of a --plugin (repeatable)",
        metavar="KIND",
    )
    grace: float | None = GRACE
    places: Places

    def __post_init__(self) -> None:
        if self.resume and self.fresh:
            raise UsageError("--resume and --fresh exclude each other")
        if self.model and "model" in dict(self.set):
            raise UsageError("--model and --set model exclude each other")

    def trackers(self) -> tuple[TrackerConfig, ...]:
        """The trackers beside MLflow. Raises UsageError for an unknown kind."""
        from moe.config import did_you_mean
        from orchestrator import tracking

        for name in dir(tracking):
            if name.endswith("Config"):
                getattr(tracking, name)  # a kind joins when it is imported
        known: Any = tracking.TrackerConfig.kinds
        for kind in self.tracker:
            if kind not in known:
                near = did_you_mean(kind, known)
                raise UsageError(f"--tracker {kind} is unknown; known: {', '.join(known)}{near}")
        return tuple(known[kind]() for kind in self.tracker)

    def mode(self) -> Literal["auto", "resume", "fresh"]:
        return "resume" if self.resume else "fresh" if self.fresh else "auto"

    def asks_for_fields(self) -> bool:
        return any(field == "help" for field, _ in self.set)

    def fields(self) -> dict[str, Any]:
        """The fields of the file of --config, by dotted names. Raises UsageError if it cannot be read."""
        from orchestrator.config_file import read_toml

        return read_toml(self.config, self.places.root()) if self.config else {}

    def check_fields(self, base: RunConfig) -> None:
        """Raises UsageError for a --set of a field that `base` has not, before libraries are loaded that data
        and weights need. What another model decides is left to `changes`.
        """
        from orchestrator.codec import override

        if self.model or self.config or self.init_from or "model" in dict(self.set):
            return
        try:
            override(base, dict(self.set))
        except UsageError as error:
            if str(error).startswith("unknown field") and not self.asks_for_fields():
                raise

    def applied(self, base: RunConfig) -> RunConfig:
        """`base` with the changes of the flags."""
        from orchestrator.codec import override

        return override(base, self.changes(base))

    def changes(
        self, base: RunConfig, *, source: str = "digits", model_of_weights: bool = False
    ) -> dict[str, Any]:
        """The changes of the flags, and of the file of --config, to `base`. The data decide the number of
        classes, unless it is set.

        Args:
            source: the images that are packed if there is no --data. If it is empty too, neither the place of
                the images nor their classes are changed.
            model_of_weights: without --model, the model is that of the weights that --init-from names. Of
                weights of other projects it always is.
        """
        from moe.codec import member_of, to_dict
        from moe.model import ModelConfig
        from orchestrator.checkpoint.models import read_model
        from orchestrator.checkpoint.weights import is_import
        from orchestrator.config_file import check_written, merged
        from orchestrator.data.manifest import open_manifest
        from orchestrator.packing.pack import digits

        fields = self.fields()
        written = str(fields.pop("name", base.name)).rpartition("/")[2]
        try:
            name = run_name(self.name or written)
        except UsageError as error:  # a sweep of the user's own
            raise UsageError(f"name {error}") from None
        assigned = dict(self.set)
        used = {
            "name": "--name",
            "storage": "--storage",
            "data.path": "--data",
            "train.init_from": "--init-from",
            "plugins": "--plugin",
        }
        for field, instead in used.items():
            if field in assigned:
                raise UsageError(f"--set {field}: use {instead}")
        for field in ("storage", "plugins"):
            if field in fields:
                raise UsageError(f"{self.config}: {field}: use {used[field]}")
        data, init_from = fields.pop("data.path", None), fields.pop("train.init_from", None)
        if self.data and data:
            fields.pop("model.num_classes", None)  # of other data
        data, init_from = self.data or data, init_from if self.init_from is None else self.init_from
        # Bad places are refused before the digits are packed.
        self.places.uri()
        self.places.check_writable()
        root = self.places.root()
        changes: dict[str, Any] = {"name": name, "storage": root}
        if data or source:
            path = self.places.shards(data) if data else digits(root, source)
            if not (data or self.fresh):
                check_trained_on(path, self.places.below(name))
            changes |= {"data.path": path}
        weights = None if init_from is None else self._weights(init_from, name)
        optional = {
            "model": self.model,
            "scale.workers": self.workers,
            "scale.ep": self.ep,
            "scale.profile_steps": self.profile,
            "train.seed": self.seed,
        }
        explicit = {field: value for field, value in optional.items() if value is not None} | assigned
        assigned = merged(fields, explicit)
        if isinstance(assigned.get("model"), str):
            changes["model"] = to_dict(preset(assigned.pop("model")))
        elif weights and (model_of_weights or is_import(weights)):
            was = read_model(weights, whole=False).run
            changes["model"] = to_dict(was.model)
            changes |= {f"data.{field}": value for field, value in was.data.eval_settings().items()}
        if weights:
            changes["train.init_from"] = weights
        if path := changes.get("data.path"):
            written = {**to_dict(base.model), **changes.get("model", {})}
            try:
                model = member_of(ModelConfig, {"kind": assigned.get("model.kind", written["kind"])}, "model")
            except ValueError as error:
                raise UsageError(str(error)) from None
            sized = model.for_classes(len(open_manifest(path).classes))
            changes |= {f"model.{field}": value for field, value in sized.items()}
        changes |= assigned
        if self.config:
            check_written(self.config, fields, base, changes)
        return changes

    def _weights(self, model: str, name: str) -> str:
        """The location of the weights that --init-from names.

        The weights of a path may be gone if the run has begun from them: they are not needed any more.

        Raises:
            UsageError: if there is no such model.
        """
        from orchestrator import storage
        from orchestrator.checkpoint import manifest
        from orchestrator.evaluation.models import model_location
        from orchestrator.runs.run_directory import RunDir

        directory = self.places.below(name)
        try:
            return model_location(model, root=self.places.root(), tracking_uri=self.places.uri())
        except UsageError as error:
            if manifest.steps(RunDir(directory).checkpoints):
                record = RunDir(directory).record()
                began = record.config["train"]["init_from"] if record else None
                for place in (storage.absolute(model), self.places.below(model)):
                    if began in (place, RunDir(place).checkpoints):
                        return began
            raise UsageError(f"--init-from {model}: {error}") from None


def check_trained_on(default: str, directory: str) -> None:
    """Raises UsageError if the run or the sweep in the directory has other data than `default`, which a
    command without --data would take.
    """
    from orchestrator.runs.run_directory import RunDir
    from orchestrator.runs.sweep_directory import SweepDir

    run, sweep = RunDir(directory).record(), SweepDir(directory).record()
    config = run.config if run else sweep.base if sweep else None
    was = config["data"]["path"] if config else default
    # The storage may have been moved or copied.
    if was.rpartition("/")[2] != default.rpartition("/")[2]:
        raise UsageError(
            f"{directory} was trained on {was}, and without --data it would be {default}: give --data {was},"
            " or use another --name"
        )


def preset(name: str) -> ModelConfig:
    """The model of the papers with this name. Raises UsageError if there is none."""
    from moe import presets

    try:
        return presets.preset(name)
    except ValueError as error:
        raise UsageError(str(error)) from None


def print_fields(base: RunConfig) -> None:
    """Prints every field that --set knows, with its default."""
    from moe.guests import join_families
    from orchestrator.codec import describe

    join_families()
    print("fields for --set and their defaults here (of several kinds, one is active):")
    print("\n".join(f"  {line}" for line in describe(base)))


def main() -> None:
    flags = parse(RunFlags, __doc__)
    doing, places = f"training {flags.name or 'train'}", flags.places
    if flags.list or flags.asks_for_fields():
        doing, places = "listing" if flags.list else "train: fields", None
    with command(doing, places, plugins=flags.places.plugin, grace=flags.grace):
        train(flags)


def train(flags: RunFlags) -> None:
    from jobs._list import print_models

    if flags.list:
        return print_models()
    from orchestrator.config import RunConfig

    flags.check_fields(RunConfig())
    from jobs._describe import describe_data, describe_model
    from orchestrator.runs.run_directory import RunDir
    from orchestrator.training.fit import check_data
    from orchestrator.training.train import resolved, train as train_run

    if flags.asks_for_fields():
        return print_fields(RunConfig())
    trackers = flags.trackers()
    run = resolved(flags.applied(RunConfig()))
    check_data(run, verify=flags.verify)
    print(f"{run.name}: {describe_model(run.model)}, {describe_data(run)}", flush=True)
    if not run.inline:
        connect()
    store = flags.places.open_store()
    try:
        result = train_run(run, mode=flags.mode(), store=store, labels=source_labels(), trackers=trackers)
    except UsageError:
        raise
    except Exception as error:
        sys.exit(f"error: {run.name} failed: {reason_of(error)}")
    ended = "is complete: finished" if result.status == "finished" else result.status
    print(f"{run.name} {ended} after {result.step} steps, files in {RunDir.of(run).path}")
    for name, value in sorted(result.metrics.items()):
        print(f"  {name:28} {value:.6g}")
    if better := result.better_checkpoint():
        print(f"best of the checkpoints kept, by {run.task.quality}: {better}")
    if result.status == "diverged":
        sys.exit(f"error: {run.name} diverged: {result.reason or f'at step {result.step}'}")
    exit_if_unsent(RunDir.of(run).path)


if __name__ == "__main__":
    main()

"""Write a checkpoint's weights as one safetensors file, or as a folder with a config; either is loaded with
`moe`, torch and safetensors alone. Or list the checkpoints of a run.

python jobs/export.py --name soft --out soft.safetensors        the newest whole checkpoint of a run
python jobs/export.py --name soft --out soft                    model.safetensors and config.json
python jobs/export.py --name quickstart/trials/w16-soft-seed0 --step 120 --out arm.safetensors
python jobs/export.py --checkpoint s3://bucket/runs/soft/checkpoints --out soft.safetensors
python jobs/export.py --name soft --list                        exit code 1 if a checkpoint is damaged
"""

import json
from dataclasses import dataclass

from jobs._cli import Storage, check_file, check_out, command
from jobs._flags import flag, parse
from orchestrator.errors import UsageError
from orchestrator.names import RESERVED


@dataclass(frozen=True, kw_only=True)
class ExportFlags:
    name: str | None = flag(None, "name of the run; in a sweep SWEEP/trials/ARM or SWEEP/confirm/ARM")
    checkpoint: str | None = flag(None, "directory or URI of checkpoints, or the folder of a checkpoint")
    step: int | None = flag(None, "export this checkpoint and no other; default: the newest whole checkpoint")
    out: str | None = flag(None, "local file, ending in .safetensors; any other name is a local folder")
    list: bool = flag(False, "print step, quality, size and state of each checkpoint")
    force: bool = flag(False, "replace an earlier export at --out")
    where: Storage

    def __post_init__(self) -> None:
        if (self.name is None) == (self.checkpoint is None):
            raise UsageError("give either --name or --checkpoint")
        if (self.out is None) == (not self.list):
            raise UsageError("give either --out or --list")


def main() -> None:
    flags = parse(ExportFlags, __doc__)
    doing = "listing checkpoints of" if flags.list else "exporting"
    with command(f"{doing} {flags.name or flags.checkpoint}"):
        export(flags)


def export(flags: ExportFlags) -> None:
    """Writes the weights, or lists checkpoints and exits with 1 if one of them is damaged.

    Raises:
        UsageError: if there is no such checkpoint, or --out exists already or is a folder of other files.
    """
    from moe.load import WEIGHTS, load
    from orchestrator import storage
    from orchestrator.checkpoint import weights
    from orchestrator.checkpoint.files import SUFFIX
    from orchestrator.checkpoint.manifest import folder_of, is_there

    location = storage.absolute(flags.checkpoint or flags.where.below(flags.name or "", "checkpoints"))
    if flags.out is None:
        raise SystemExit(0 if print_states(location, steps_of(location, flags.step)) else 1)
    directory = location
    if flags.step is not None:
        (step,) = steps_of(location, flags.step)
        location = folder_of(location, step)
    elif is_there(location):
        directory = location.rpartition("/")[0]
    else:
        steps_of(location, None)
    out = storage.absolute(flags.out)
    is_file = flags.out.endswith(SUFFIX)
    if is_file:
        check_file("--out", out)
    elif storage.is_local(out):
        check_out(out, own=(WEIGHTS,), apart=(directory.removesuffix("/checkpoints"),))
    weights.export(location, out, force=flags.force)
    print_exported(out if is_file else storage.join(out, WEIGHTS))
    print(f"from {load.__module__} import load; model = load({out!r})")


def steps_of(directory: str, step: int | None) -> list[int]:
    """Returns `step` if there is such a checkpoint; without `step` the steps of all checkpoints.

    Raises:
        UsageError: if there is no such checkpoint, with the runs, files or steps that are there.
    """
    from orchestrator import storage
    from orchestrator.checkpoint import manifest as manifests

    steps = manifests.steps(directory)
    if not steps:
        place = directory
        while not (found := storage.names(place)) and "/" in place.rpartition("://")[2].strip("/"):
            place = place.rpartition("/")[0]
        shown = [name for name in found if name not in RESERVED and not name.startswith("mlflow.db")]
        raise UsageError(f"no checkpoint in {directory}; {place} holds: {', '.join(shown) or 'nothing'}")
    if step is None:
        return steps
    if step not in steps:
        raise UsageError(f"no checkpoint of step {step} in {directory}; of: {', '.join(map(str, steps))}")
    return [step]


def print_states(directory: str, steps: list[int]) -> bool:
    """Prints a line per checkpoint, after hashing its files; returns whether all are whole."""
    from orchestrator.checkpoint import manifest as manifests
    from orchestrator.checkpoint.manager import BEST_BY, quality_of

    print(f"{'step':>9} {BEST_BY:>9} {'MB':>9}  state")
    all_whole = True
    for step in steps:
        folder, quality, megabytes = manifests.folder_of(directory, step), quality_of(directory, step), ""
        try:
            manifest = manifests.read(folder)
            megabytes = f"{manifest.size() / 1e6:.1f}"
            manifests.verified(folder)
            state = "whole" if manifest.has_optimizer() else "whole, weights only"
        except manifests.DamagedError as error:
            all_whole, state = False, f"damaged: {error}"
        shown = "" if quality is None else f"{quality:.4f}"
        print(f"{step:9} {shown:>9} {megabytes:>9}  {state}", flush=True)
    return all_whole


def print_exported(path: str) -> None:
    """Prints what the file holds."""
    from safetensors import safe_open

    from moe.cost import num_params
    from moe.vit import ViTConfig
    from orchestrator import storage
    from orchestrator.codec import from_dict

    with safe_open(path, "pt") as file:
        metadata, tensors = file.metadata(), len(file.keys())
    params = num_params(from_dict(ViTConfig, json.loads(metadata["config"])["model"]))
    size = (storage.size(path) or 0) / 1e6
    print(f"{path}: step {metadata['step']}, {tensors} tensors, {params:,} parameters, {size:.1f} MB")


if __name__ == "__main__":
    main()

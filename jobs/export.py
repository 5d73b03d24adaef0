"""Write a checkpoint's weights as one safetensors file, or as a folder with a config; either is loaded with
`moe`, torch and safetensors alone. Or list the checkpoints of a run.

python jobs/export.py soft --out soft.safetensors        the newest whole checkpoint of a run
python jobs/export.py soft --out soft                    model.safetensors and config.json
python jobs/export.py models:/quickstart@pareto-best --out best.safetensors
python jobs/export.py quickstart/trials/w16-soft-seed0 --step 120 --out arm.safetensors
python jobs/export.py s3://bucket/runs/soft/checkpoints --out soft.safetensors
python jobs/export.py soft --list                        exit code 1 if a checkpoint is damaged
"""

import json
from dataclasses import dataclass

from jobs._cli import Places, check_file, check_out, command
from jobs._flags import MODEL, flag, parse
from orchestrator.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class ExportFlags:
    model: str = flag(help=MODEL, positional=True)
    step: int | None = flag(None, "export this checkpoint and no other; default: the newest whole checkpoint")
    out: str | None = flag(None, "local file, ending in .safetensors; any other name is a local folder")
    list: bool = flag(False, "print step, quality, size and state of each checkpoint")
    fresh: bool = flag(False, "replace an earlier export at --out")
    places: Places

    def __post_init__(self) -> None:
        if (self.out is None) == (not self.list):
            raise UsageError("give either --out or --list")


def main() -> None:
    flags = parse(ExportFlags, __doc__)
    doing = "listing checkpoints of" if flags.list else "exporting"
    with command(f"{doing} {flags.model}", plugins=flags.places.plugin):
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
    from orchestrator.checkpoint.manifest import folder_of, is_there, steps
    from orchestrator.evaluation.models import model_location

    places = flags.places
    location = model_location(flags.model, root=places.root(), tracking_uri=places.tracking_uri)
    if location.endswith(SUFFIX):
        raise UsageError(f"{location} is a file of weights already, and checkpoints are exported")
    is_single = is_there(location)
    directory = location.rpartition("/")[0] if is_single else location
    found = steps(directory)
    if flags.step is not None:
        if is_single:
            raise UsageError(f"--step {flags.step}: {flags.model} is a single checkpoint")
        if flags.step not in found:
            listed = ", ".join(map(str, found))
            raise UsageError(f"no checkpoint of step {flags.step} in {directory}; of: {listed}")
        found, location = [flags.step], folder_of(directory, flags.step)
    if flags.out is None:
        raise SystemExit(0 if print_states(directory, found) else 1)
    out = storage.absolute(flags.out)
    is_file = flags.out.endswith(SUFFIX)
    if is_file:
        check_file("--out", out)
    elif storage.is_local(out):
        check_out(out, own=(WEIGHTS,), apart=(directory.removesuffix("/checkpoints"),))
    weights.export(location, out, fresh=flags.fresh)
    print_exported(out if is_file else storage.join(out, WEIGHTS))
    print(f"from {load.__module__} import load; model = load({out!r})")


def print_states(directory: str, steps: list[int]) -> bool:
    """Prints a line per checkpoint, after hashing its files; returns whether all are whole."""
    from orchestrator.checkpoint import manifest as manifests
    from orchestrator.checkpoint.manager import quality_of

    found = [manifests.read_or_none(manifests.folder_of(directory, step)) for step in steps]
    quality_name = next((manifest.task().quality for manifest in found if manifest), "quality")
    print(f"{'step':>9} {quality_name:>9} {'MB':>9}  state")
    all_whole = True
    for step in steps:
        folder, quality, megabytes = manifests.folder_of(directory, step), quality_of(directory, step), ""
        try:
            manifest = manifests.read(folder)
            megabytes = f"{manifest.size() / 1e6:.1f}"
            manifests.verify_checkpoint(folder)
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
    from moe.model import ModelConfig
    from orchestrator import storage
    from orchestrator.codec import read_config

    with safe_open(path, "pt") as file:
        metadata, tensors = file.metadata(), len(file.keys())
    params = num_params(read_config(ModelConfig, json.loads(metadata["config"])["model"]))
    size = (storage.size(path) or 0) / 1e6
    print(f"{path}: step {metadata['step']}, {tensors} tensors, {params:,} parameters, {size:.1f} MB")


if __name__ == "__main__":
    main()

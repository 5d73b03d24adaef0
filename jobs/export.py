"""Write a checkpoint's weights as one safetensors file, or as a folder with a config; either is loaded with
`moe`, torch and safetensors alone. Or list the checkpoints of a run.

python jobs/export.py --name soft --out soft.safetensors        the newest whole checkpoint of a run
python jobs/export.py --name soft --out soft                    model.safetensors and config.json
python jobs/export.py --name quickstart/trials/soft1 --step 120 --out soft1.safetensors
python jobs/export.py --checkpoint s3://bucket/runs/soft/checkpoints --out soft.safetensors
python jobs/export.py --name soft --list                        exit code 1 if any of them is damaged
"""

from __future__ import annotations

import argparse
import json

from jobs.usage import RESERVED, command, plain_parser
from orchestrator.errors import UsageError


def main() -> None:
    parser = plain_parser(__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--name", help="name of the run; in a sweep SWEEP/trials/ARM or SWEEP/confirm/ARM")
    source.add_argument("--checkpoint", help="directory or URI of checkpoints, or the folder of one")
    parser.add_argument(
        "--storage", help="root of all files; default: $MOE_FRONTIER_HOME, else ~/moe-frontier"
    )
    parser.add_argument(
        "--step", type=int, help="this checkpoint and no other; default: the newest whole one"
    )
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--out", help="local file, ending in .safetensors; any other name is a local folder")
    task.add_argument("--list", action="store_true", help="step, quality, size and state of each checkpoint")
    parser.add_argument("--force", action="store_true", help="replace the export that --out is or holds")
    args = parser.parse_args()
    doing = "listing checkpoints of" if args.list else "exporting"
    with command(f"{doing} {args.name or args.checkpoint}"):
        export(args)


def export(args: argparse.Namespace) -> None:
    """Writes the weights, or lists checkpoints and exits with 1 if any of them is damaged.

    Raises:
        UsageError: if there is no such checkpoint, or --out is there already or is a folder of other files.
    """
    from jobs.command import check_file, check_out, root
    from moe.load import WEIGHTS, load
    from orchestrator import storage
    from orchestrator.checkpoint import weights
    from orchestrator.checkpoint.files import SUFFIX
    from orchestrator.checkpoint.manifest import folder_of, is_there

    location = storage.absolute(args.checkpoint or storage.join(root(args), args.name, "checkpoints"))
    if args.list:
        raise SystemExit(0 if print_states(location, steps_of(location, args.step)) else 1)
    directory = location
    if args.step is not None:
        (step,) = steps_of(location, args.step)
        location = folder_of(location, step)
    elif is_there(location):
        directory = location.rpartition("/")[0]
    else:
        steps_of(location, None)
    out = storage.absolute(args.out)
    if args.out.endswith(SUFFIX):
        check_file("--out", out)
    elif storage.is_local(out):
        check_out(out, own=(WEIGHTS,), apart=(directory.removesuffix("/checkpoints"),))
    weights.export(location, out, force=args.force)
    print_exported(out if args.out.endswith(SUFFIX) else storage.join(out, WEIGHTS))
    print(f"from {load.__module__} import load; model = load({out!r})")


def steps_of(directory: str, step: int | None) -> list[int]:
    """Returns `step` if there is such a checkpoint; without it the steps of all checkpoints.

    Raises:
        UsageError: if there is none, with the runs, files or steps that are there.
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
    from orchestrator.checkpoint.manifest import DamagedError, verified

    print(f"{'step':>9} {BEST_BY:>9} {'MB':>9}  state")
    all_whole = True
    for step in steps:
        folder, quality, megabytes = manifests.folder_of(directory, step), quality_of(directory, step), ""
        try:
            manifest = manifests.read(folder)
            megabytes = f"{manifest.size() / 1e6:.1f}"
            verified(folder)
            state = "whole" if manifest.has_optimizer() else "whole, weights only"
        except DamagedError as error:
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
    config = from_dict(ViTConfig, json.loads(metadata["config"])["model"])
    print(
        f"{path}: step {metadata['step']}, {tensors} tensors,"
        f" {num_params(config):,} parameters, {(storage.size(path) or 0) / 1e6:.1f} MB"
    )


if __name__ == "__main__":
    main()

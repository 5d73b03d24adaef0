"""Write a checkpoint's weights as one safetensors file, or as a folder with a config that needs nothing but
`moe` and torch to be loaded; or list what checkpoints there are.

python jobs/export.py --name soft --out soft.safetensors        the newest whole checkpoint of a run
python jobs/export.py --name soft --out soft/                   model.safetensors and config.json
python jobs/export.py --name quickstart/trials/soft1 --step 120 --out soft1.safetensors
python jobs/export.py --checkpoint s3://bucket/runs/soft/checkpoints --out soft.safetensors
python jobs/export.py --name soft --list                        exit code 1 if any of them is damaged
"""

import argparse
import json
import os

from jobs.command import RESERVED, root
from jobs.usage import command
from moe.cost import num_params
from moe.load import WEIGHTS, load
from moe.vit import ViTConfig
from orchestrator import storage
from orchestrator.codec import from_dict
from orchestrator.config import UsageError
from orchestrator.training.checkpoint import manifest as manifests
from orchestrator.training.checkpoint.find import verified
from orchestrator.training.checkpoint.manifest import MANIFEST, DamagedError
from orchestrator.training.checkpoint.retention import BEST_BY, quality_of
from orchestrator.training.checkpoint.single_file import read_header
from orchestrator.training.checkpoint.weights import export, export_folder, load_exported


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--name", help="of the run; in a sweep SWEEP/trials/ARM or SWEEP/confirm/ARM")
    source.add_argument("--checkpoint", help="directory or URI of checkpoints, or the folder of one")
    parser.add_argument(
        "--storage", help="root of all files; default: $MOE_FRONTIER_HOME, else ~/moe-frontier"
    )
    parser.add_argument(
        "--step", type=int, help="this checkpoint and no other; default: the newest whole one"
    )
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--out", help="local file, ending in .safetensors, or local folder, ending in /")
    task.add_argument("--list", action="store_true", help="step, quality, size and state of each checkpoint")
    parser.add_argument("--force", action="store_true", help="replace --out if it is there")
    args = parser.parse_args()
    with command():
        location = storage.absolute(args.checkpoint or storage.join(root(args), args.name, "checkpoints"))
        if args.list:
            raise SystemExit(0 if print_states(location, steps_of(location, args.step)) else 1)
        if args.step is not None:
            (step,) = steps_of(location, args.step)
            location = manifests.folder_of(location, step)
        elif not is_checkpoint(location):
            steps_of(location, None)
        out = storage.absolute(args.out)
        if args.out.endswith("/") or (storage.is_local(out) and os.path.isdir(out)):
            export_folder(location, out, force=args.force)
            print_exported(
                storage.join(out, WEIGHTS), f"from {load.__module__} import load", f"load({out!r})"
            )
        else:
            export(location, out, force=args.force)
            code = f"from {load_exported.__module__} import load_exported"
            print_exported(out, code, f"load_exported({out!r})")


def is_checkpoint(location: str) -> bool:
    return storage.size(storage.join(location, MANIFEST)) is not None


def steps_of(directory: str, step: int | None) -> list[int]:
    """`step` if there is such a checkpoint; without it all that there are.

    Raises:
        UsageError: if there is none, saying what there is.
    """
    steps = manifests.steps(directory)
    if not steps:
        place = directory
        while not (found := storage.names(place)) and "/" in place.rpartition("://")[2].strip("/"):
            place = place.rpartition("/")[0]
        shown = ", ".join(name for name in found if name not in RESERVED) or "nothing"
        raise UsageError(f"no checkpoint in {directory}; {place} holds: {shown}")
    if step is None:
        return steps
    if step not in steps:
        raise UsageError(f"no checkpoint of step {step} in {directory}; of: {', '.join(map(str, steps))}")
    return [step]


def print_states(directory: str, steps: list[int]) -> bool:
    """A line per checkpoint, after hashing its files; whether all are whole."""
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


def print_exported(path: str, imports: str, call: str) -> None:
    """What was written, and the line of Python that loads it."""
    header = read_header(path)
    config = from_dict(ViTConfig, json.loads(header.metadata["config"])["model"])
    print(
        f"{path}: step {header.metadata['step']}, {len(header.tensors)} tensors,"
        f" {num_params(config):,} parameters, {header.bytes / 1e6:.1f} MB"
    )
    print(f"{imports}; model = {call}")


if __name__ == "__main__":
    main()

"""What commands that look at trained models share: which models, which images."""

import argparse
from collections.abc import Sequence

from jobs.command import add_places, root
from jobs.usage import at_least_one
from orchestrator import storage
from orchestrator.config import UsageError
from orchestrator.data.adopt import adopt
from orchestrator.data.manifest import has_manifest, open_manifest
from orchestrator.evaluation.classes import Classes, classes_of
from orchestrator.evaluation.trained import NAMES, Trained, find_trained
from orchestrator.tracking import TrackedRun, Tracking, writer
from orchestrator.tracking.find import found_run
from orchestrator.tracking.search import key_part


def evaluation_parser(doc: str | None, *, several: bool) -> argparse.ArgumentParser:
    """`several`: models, each of the kinds of `trained.NAMES`; else one."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="+" if several else None, help=NAMES)
    parser.add_argument(
        "--data", help="shards, as for training; default: those that the model was trained on"
    )
    parser.add_argument("--split", choices=("train", "val"), default="val", help="(%(default)s)")
    parser.add_argument(
        "--batch-size", type=at_least_one, default=64, help="images per forward pass (%(default)s)"
    )
    add_places(parser)
    return parser


def models_of(args: argparse.Namespace, store: Tracking) -> list[Trained]:
    """Every model that was named, once. Raises UsageError for one that is not there."""
    named = args.model if isinstance(args.model, list) else [args.model]
    found = [one for name in named for one in find_trained(name, root=root(args), tracking=store)]
    if not isinstance(args.model, list) and len(found) > 1:
        raise UsageError(f"{args.model} means {len(found)} models, and this command looks at one")
    return list({one.location: one for one in found}.values())


def images_path(args: argparse.Namespace, model: Trained) -> str:
    """The shards that were asked for, else the model's own."""
    if not args.data:
        return model.run.data.path
    path = storage.absolute(args.data)
    return path if has_manifest(path) else adopt(path, root(args))


def tell_other_classes(model: Trained, path: str) -> Classes:
    """Those of the images; a line if they are others than those that the model learned, or nobody knows.

    Raises:
        UsageError: if labels fit neither by name nor by number.
    """
    found, here = classes_of(model, path), open_manifest(path).classes
    if not model.classes:
        print(
            f"note: nobody knows which classes {model.name} learned, for {model.run.data.path} is gone or has"
            f" others: labels of {path} ({_few(here)}) are compared by number",
            flush=True,
        )
    elif here != model.classes[: len(here)]:
        classes = f"other classes ({_few(here)}) than {model.name} learned ({_few(model.classes)})"
        how = "name" if found.labels else "number"
        print(f"note: {path} has {classes}: labels are compared by {how}", flush=True)
    return found


def results_of(store: Tracking, run_id: str, *paths: str) -> tuple[TrackedRun, list[str]]:
    """The run, and what its figures of each of these data sets are called: the last part of the path, or as
    many as tell it from others that the run was evaluated on. Tags ``eval.data.<name>`` remember.
    """
    found = found_run(store, run_id)
    tags, names = dict(found.tags), []
    for path in paths:
        parts = [key_part(part) for part in path.split("/") if part]
        tails = ["-".join(parts[-length:]) for length in range(1, len(parts) + 1)]
        names.append(next((t for t in tails if tags.get(f"eval.data.{t}", path) == path), tails[-1]))
        tags[f"eval.data.{names[-1]}"] = path
    run = writer(store, found)
    run.tag(**{f"eval.data.{name}": path for name, path in zip(names, paths, strict=True)})
    return run, names


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f", .. {len(names)}" if len(names) > 3 else "")

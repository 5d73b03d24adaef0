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
from orchestrator.tracking import Tracking


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
    """Those of the images; a line if they are others than those that the model learned, as far as that is
    known.
    """
    found, here = classes_of(model.run, path), open_manifest(path).classes
    if found.learned and here != found.learned[: len(here)]:
        classes = f"other classes ({_few(here)}) than {model.name} learned ({_few(found.learned)})"
        how = "by name" if found.labels else "by number, for not all have a name that it learned"
        print(f"note: {path} has {classes}: labels are compared {how}", flush=True)
    return found


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f", .. {len(names)}" if len(names) > 3 else "")

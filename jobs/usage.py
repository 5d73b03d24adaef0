"""Flags, the first line and the handling of errors and signals that all commands share.

`--help` and usage errors must answer at once, so nothing here imports a large library.
"""

import argparse
import json
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from orchestrator.errors import UsageError

STOP_S = 2.5  # after a signal: what has not ended by then is cut off, which loses nothing
SIGNALS = (signal.SIGINT, signal.SIGTERM)  # of Ctrl-C; of `ray job stop`, Kubernetes and batch systems
_arrived = 0  # the signal that has arrived, if any
RESERVED = (  # what else lies below the storage
    "data",
    "evaluation",
    "mlartifacts",
    "mlflow.db",
    "operating-points",
    "reports",
    "routing",
    "studies",
)
MODEL = (
    "a run below the storage (soft, quickstart/trials/soft1), a directory of checkpoints, the folder of one,"
    " an exported file or folder, models:/NAME@ALIAS or models:/NAME/VERSION, runs:/ID of MLflow"
)
MODELS = f"{MODEL}, or sweep:NAME: its finished trials"
POINT = (
    "routing.k=1, routing.capacity=0.3, routing.priority=none|max|sum, routing.experts=2 (the best 2 of each"
    " group) or [0,5] (these), routing.random_blocks=[1]"
)


@contextmanager
def command(doing: str, to: TextIO | None = None) -> Iterator[None]:
    """Prints what begins, before libraries are loaded; turns a user's mistake into one line and exit code 1,
    Ctrl-C into exit code 130 and SIGTERM into 143, at most `STOP_S` seconds after the signal.
    """
    print(f"{doing}: loading libraries ..", flush=True, file=to)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("orchestrator").setLevel(logging.INFO)
    before = {number: signal.getsignal(number) for number in SIGNALS}
    stop_soon_on_signals()
    try:
        yield
    except (UsageError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print("Interrupted. Run the same command again to continue.", file=sys.stderr, flush=True)
        sys.stdout.flush()
        # Libraries would take seconds to tidy up what ends with this process anyway.
        os._exit(128 + (_arrived or signal.SIGINT))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def stop_soon_on_signals() -> None:
    """Lets the first signal unwind the program, which tells MLflow, within `STOP_S`; a second ends it.

    To be called again when a library, such as Ray, has set handlers of its own.
    """
    for number in SIGNALS:
        signal.signal(number, _stop_soon)


def _stop_soon(number: int, _: Any) -> None:
    global _arrived
    if _arrived:
        os._exit(128 + number)
    _arrived = number
    timer = threading.Timer(STOP_S, os._exit, (128 + number,))
    timer.daemon = True
    timer.start()
    raise KeyboardInterrupt


def plain_parser(doc: str | None, **options: Any) -> argparse.ArgumentParser:
    """A parser whose help is the command's docstring, as it is written."""
    return argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, **options
    )


def add_places(parser: argparse.ArgumentParser) -> None:
    """The flags of where files and runs lie, which `command.root` and `command.tracking` read."""
    parser.add_argument(
        "--storage", help="root of all files; default: $MOE_FRONTIER_HOME, else ~/moe-frontier"
    )
    parser.add_argument(
        "--tracking-uri", help="default: $MLFLOW_TRACKING_URI, else mlflow.db below the storage"
    )


def run_parser(
    doc: str | None, *, name: str, parents: Sequence[argparse.ArgumentParser] = ()
) -> argparse.ArgumentParser:
    """The flags of `train.py` and `pareto_sweep.py`. `name`: help text about the default of --name."""
    parser = plain_parser(doc, parents=list(parents))
    parser.add_argument(
        "--name", type=run_name, help=f"of the run, its directory and its MLflow run ({name})"
    )
    parser.add_argument(
        "--data",
        help="directory or URI of shards, or of WebDataset tars or parquet files that somebody else wrote;"
        " default: the digits, packed below the storage",
    )
    add_places(parser)
    parser.add_argument("--init-from", metavar="MODEL", help=f"start from the weights of {MODEL}")
    parser.add_argument("--workers", type=int, help="processes that train one model together (scale.workers)")
    parser.add_argument("--ep", help="of them, those that share one set of experts, or auto (scale.ep)")
    parser.add_argument(
        "--profile",
        type=int,
        metavar="STEPS",
        help="where the time of a step goes, as an artifact (scale.profile_steps)",
    )
    parser.add_argument("--seed", type=int, help="train.seed")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="any field, e.g. train.lr=3e-4 (repeatable); --set help lists all fields and their defaults",
    )
    parser.add_argument(
        "--verify", action="store_true", help="read all shards and check their SHA-256 before training"
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--resume", dest="mode", action="store_const", const="resume", help="insist on continuing"
    )
    mode.add_argument(
        "--fresh", dest="mode", action="store_const", const="fresh", help="move what is there aside"
    )
    parser.set_defaults(mode="auto")
    return parser


def evaluation_parser(doc: str | None, *, several: bool) -> argparse.ArgumentParser:
    """The flags of commands that look at trained models: at `several`, or at one."""
    parser = plain_parser(doc)
    parser.add_argument("model", nargs="+" if several else None, help=MODELS if several else MODEL)
    parser.add_argument(
        "--data", help="shards, as for training; default: those that the model was trained on"
    )
    parser.add_argument("--split", choices=("train", "val"), default="val", help="(%(default)s)")
    parser.add_argument(
        "--batch-size", type=at_least_one, default=64, help="images per forward pass (%(default)s)"
    )
    add_places(parser)
    return parser


def run_name(text: str) -> str:
    """The type of --name."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", text, re.ASCII):
        raise argparse.ArgumentTypeError(
            f"{text!r}: begin with a letter or digit, and use letters, digits, '.', '_' and '-'"
        )
    if text in RESERVED or text.startswith("mlflow.db"):
        raise argparse.ArgumentTypeError(f"{text!r} is reserved, as are {', '.join(RESERVED)}")
    return text


def at_least_one(text: str) -> int:
    """The type of a flag that counts something."""
    try:
        count = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if count < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {count}")
    return count


def assignment(text: str) -> tuple[str, Any]:
    """The field and the value of a --set FIELD=VALUE. Raises UsageError."""
    field, equals, value = text.partition("=")
    if not equals or not field:
        raise UsageError(f"--set {text!r}: write FIELD=VALUE")
    if value == "null" or value.startswith(("[", "{")):
        try:
            return field, json.loads(value)
        except ValueError as error:
            raise UsageError(f"--set {text!r}: {error}") from None
    return field, value


def named(models: Sequence[str]) -> str:
    """Models as the first line of a command names them."""
    return ", ".join(models[:3]) + (f" and {len(models) - 3} more" if len(models) > 3 else "")

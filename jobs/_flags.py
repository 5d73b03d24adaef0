"""Typed flags: a command declares a frozen dataclass, whose fields are its flags or groups of flags.

argparse reads the flags, because its errors are one line each; a dataclass carries them further.
"""

import argparse
import dataclasses
import difflib
import json
import re
from collections.abc import Callable, Iterable
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from orchestrator.errors import UsageError

T = TypeVar("T")

MODEL = (
    "a run below the storage (soft, quickstart/trials/w16-soft-seed0), the knee, fastest or best model of a"
    " sweep (quickstart@knee, @fast, @best), a directory of checkpoints, the folder of a checkpoint, an"
    " exported file or folder, models:/NAME@ALIAS, models:/NAME/VERSION or runs:/ID of MLflow"
)
MODELS = f"{MODEL}, or sweep:NAME for its finished trials"
POINT = (
    "routing.k=1, routing.capacity=0.3, routing.priority=none|max|sum, routing.experts=2 (the best 2 of each"
    " group) or [0,5] (these), routing.images_per_group=1, routing.random_blocks=[1]"
)


def flag(
    default: Any = dataclasses.MISSING,
    help: str = "",
    *,
    positional: bool = False,
    metavar: str | None = None,
    read: Callable[[str], Any] | None = None,
    least: int | None = None,
    nargs: str | None = None,
) -> Any:
    """A field that the command line fills. A field of a tuple collects all uses of its flag.

    Args:
        default: without it, the flag must be given.
        read: makes a value of the text; by default the type of the field does.
        least: the lower bound of a number.
        nargs: the option of argparse; ``+`` lets several values follow each use of the flag.
    """
    options = {"help": help, "metavar": metavar, "read": read, "least": least, "nargs": nargs}
    return dataclasses.field(default=default, metadata={**options, "positional": positional})


PLUGIN = flag((), "file of your own that defines routers, models or optimisers (repeatable)", metavar="FILE")
GRACE = flag(
    None,
    "seconds from a signal to the forced end, in which training saves; default: 25, of a submitted job half a"
    " second less than $RAY_JOB_STOP_WAIT_TIME_S",
    read=lambda text: positive(text),
)


def parse(flags: type[T], doc: str | None, *, epilog: str = "") -> T:
    """The checked flags of `sys.argv`. Wrong flags end the process with one line and exit code 2."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = _Parser(description=doc, epilog=epilog, formatter_class=raw)
    needed = [action for action in _add_flags(parser, parser, flags) if action.required]
    words = [" ".join([*a.option_strings, a.metavar or a.dest.upper()]) for a in needed]  # pyright: ignore
    parser.usage = " ".join(["%(prog)s", *words, "[flags]"])
    try:
        return _build(flags, vars(parser.parse_args()))
    except UsageError as error:
        parser.error(str(error))


def near(word: str, known: Iterable[str]) -> str:
    """Returns ``; did you mean --name?`` for a word that is almost one of those known, else nothing.

    `moe.config.did_you_mean` says the same of values, but importing it loads torch.
    """
    found = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {found[0]}?" if found else ""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        word = message.removeprefix("unrecognized arguments: ").split(maxsplit=1)[0].partition("=")[0]
        meant = near(word, self._option_string_actions) if word.startswith("--") else ""
        self.exit(2, f"error: {message}{meant or '; --help shows all flags'}\n")


def _add_flags(parser: _Parser, group: Any, flags: type) -> list[argparse.Action]:
    """Adds the flags of a dataclass to the group, and each dataclass among its fields as a group."""
    actions, hints = [], get_type_hints(flags)
    for field in dataclasses.fields(flags):
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind):
            assert isinstance(kind, type)
            actions += _add_flags(parser, parser.add_argument_group(kind.__doc__), kind)
        else:
            options = dict(field.metadata)
            positional = options.pop("positional")
            name = field.name if positional else f"--{field.name.replace('_', '-')}"
            options = _options(kind, field.default, **options)
            if not positional:
                options["required"] = field.default is dataclasses.MISSING
            actions.append(group.add_argument(name, **options))
    return actions


def _options(kind: Any, default: Any, *, read: Any, least: int | None, **options: Any) -> dict[str, Any]:
    """argparse's options of a field."""
    if get_origin(kind) in (Union, UnionType):
        (kind,) = (one for one in get_args(kind) if one is not NoneType)
    if kind is bool:
        return {"action": "store_true", "help": options["help"]}
    if get_origin(kind) is Literal:
        options["choices"], kind = get_args(kind), str
    if get_origin(kind) is tuple and (read is None or isinstance(default, tuple)):
        kind, default = get_args(kind)[0], None if default is None else []
        options["action"] = "extend" if options["nargs"] else "append"
    elif default not in (None, dataclasses.MISSING):
        options["help"] += " (default: %(default)s)"
    options["type"] = _reader(read or kind, least)
    if default is not dataclasses.MISSING:
        options["default"] = default
    return {name: value for name, value in options.items() if value is not None}


def _reader(read: Callable[[str], Any], least: int | None) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        try:
            value = read(text)
        except UsageError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        except ValueError:
            kind = "a whole number" if read is int else "a number"
            raise argparse.ArgumentTypeError(f"{text!r} is not {kind}") from None
        if least is not None and value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
        return value

    return convert


def _build(flags: type[T], values: dict[str, Any]) -> T:
    found = {}
    for name, kind in get_type_hints(flags).items():
        if dataclasses.is_dataclass(kind):
            assert isinstance(kind, type)
            found[name] = _build(kind, values)
        else:
            found[name] = tuple(values[name]) if isinstance(values[name], list) else values[name]
    return flags(**found)


def positive(text: str) -> float:
    """Reads a number above 0."""
    value = float(text)
    if not value > 0:
        raise UsageError(f"must be above 0, got {value:g}")
    return value


def assignment(text: str) -> tuple[str, Any]:
    """Reads the field and the value of --set FIELD=VALUE; ``help`` is a field without a value."""
    field, equals, value = text.partition("=")
    if (not equals and text != "help") or not field:
        raise UsageError(f"{text!r}: write FIELD=VALUE")
    if value == "null" or value.startswith(("[", "{")):
        try:
            return field, _json(value)
        except ValueError as error:
            raise UsageError(f"{text!r}: {error}") from None
    return field, value


def _json(text: str) -> Any:
    """Reads JSON, in which words need no quotes if nothing has them."""
    if '"' not in text:
        text = re.sub(r"(?<![\w.+-])(?!(?:true|false|null)\b)[A-Za-z_][^\s,:{}\[\]]*", r'"\g<0>"', text)
    return json.loads(text)


def numbers(kind: Callable[[str], T], example: str) -> Callable[[str], tuple[T, ...]]:
    """Reads numbers with commas between them."""

    def read(text: str) -> tuple[T, ...]:
        try:
            return tuple(kind(part) for part in text.split(","))
        except ValueError:
            raise UsageError(f"{text!r}: write numbers, e.g. {example}") from None

    return read


def pair(read: Callable[[str], T], example: str) -> Callable[[str], tuple[str, T]]:
    """Reads a field and what is set beside it, as in FIELD=VALUE."""

    def read_both(text: str) -> tuple[str, T]:
        field, _, value = text.partition("=")
        if not (field and value):
            raise UsageError(f"{text!r}: write e.g. {example}")
        return field, read(value)

    return read_both

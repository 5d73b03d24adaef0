"""Typed flags: a command declares a frozen dataclass, whose fields are its flags or groups of flags.

argparse reads the flags, because its errors are one line each; a dataclass carries them further.
"""

import argparse
import dataclasses
import inspect
import json
import math
import re
from collections.abc import Callable, Mapping
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from moe.config import Family, did_you_mean, members
from orchestrator.errors import UsageError

T = TypeVar("T")

MODEL = (
    "a run below the storage (soft, quickstart/trials/w16-soft-seed0), the knee, fastest or best model of a"
    " sweep (quickstart@knee, @fast, @best), a directory of checkpoints, the folder of a checkpoint, an"
    " exported file or folder, models:/NAME@ALIAS, models:/NAME/VERSION or runs:/ID of MLflow"
)
MODELS = f"{MODEL}, or sweep:NAME for its finished trials"


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
FIELDS = flag(
    (),
    "any field of train.py, e.g. train.microbatch=8 (repeatable)",
    metavar="FIELD=VALUE",
    read=lambda text: assignment(text),
    nargs="+",
)
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
    try:
        actions = _add_flags(parser, parser, flags)
    except argparse.ArgumentError as error:  # a plugin's field is called as a flag of the command
        parser.error(str(error))
    needed = [action for action in actions if action.required]
    words = [" ".join([*a.option_strings, a.metavar or a.dest.upper()]) for a in needed]  # pyright: ignore
    parser.usage = " ".join(["%(prog)s", *words, "[flags]"])
    try:
        return _build(flags, vars(parser.parse_args()))
    except UsageError as error:
        parser.error(str(error))


def early(name: str) -> list[str]:
    """Returns the values of a flag that decides which others there are."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument(_dashed(name), action="append", default=[])
    return vars(parser.parse_known_args()[0])[name]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        _, unknown, words = message.partition("unrecognized arguments: ")
        word = words.split(maxsplit=1)[0].partition("=")[0] if unknown else ""
        meant = did_you_mean(word, self._option_string_actions, str) if word.startswith("--") else ""
        self.exit(2, f"error: {message}{meant or '; --help shows all flags'}\n")


def _add_flags(parser: _Parser, group: Any, flags: type) -> list[argparse.Action]:
    """Adds the flags of a dataclass to the group, and each dataclass among its fields as a group."""
    actions, hints = [], get_type_hints(flags)
    for field in dataclasses.fields(flags):
        kind = hints[field.name]
        if _is_family(kind):
            _add_members(parser, kind)
        elif dataclasses.is_dataclass(kind):
            assert isinstance(kind, type)
            actions += _add_flags(parser, parser.add_argument_group(kind.__doc__), kind)
        else:
            options = dict(field.metadata)
            positional = options.pop("positional")
            name = field.name if positional else _dashed(field.name)
            options = _options(kind, field.default, **options)
            if not positional:
                options["required"] = field.default is dataclasses.MISSING
            actions.append(group.add_argument(name, **options))
    return actions


def _add_members(parser: _Parser, family: type[Family]) -> None:
    """Adds a group for each member of a family: the flag of its kind chooses it, and is followed by the field
    of that name if it has one. A field that several members have stands with the first.
    """
    there = set[str]()
    for member in members(family):
        title, _, more = inspect.cleandoc(member.__doc__ or "").partition("\n")
        group = parser.add_argument_group(f"{_dashed(member.kind)}: {title}", more.strip("\n") or None)
        fields, hints = _fields(member), get_type_hints(member)
        if member.kind not in fields:
            group.add_argument(_dashed(member.kind), **_HIDDEN, dest=f".{member.kind}", action="store_true")
        for name, field in fields.items():
            if name in there:
                continue
            there.add(name)
            sharing = {
                each.kind: _fields(each)[name].default for each in members(family) if name in _fields(each)
            }
            options = {"help": "", "metavar": None, "nargs": None, "read": None, **field.metadata}
            if get_origin(hints[name]) is tuple and options["nargs"] is None:
                example: Any = field.default
                options["read"] = numbers(get_args(hints[name])[0], ",".join(map(str, example)))
            options["help"] += _shown(sharing)
            default = field.default if options["nargs"] else None
            read = _options(hints[name], default, least=None, **options)
            if read.get("action") != "store_true":
                read.setdefault("metavar", name.upper())
            group.add_argument(_dashed(name), **{**read, **_HIDDEN}, dest=f".{name}")


_HIDDEN: dict[str, Any] = {"default": argparse.SUPPRESS}


def _shown(defaults: Mapping[str, Any]) -> str:
    """Returns, for the help of a field, which members beside the first have it, and the defaults."""
    others = [_dashed(kind) for kind in [*defaults][1:]]
    also = f"; also with {', '.join(others)}" if others else ""
    texts = {kind: str(value) for kind, value in defaults.items() if type(value) in (int, float, str)}
    values = ", ".join(dict.fromkeys(texts.values()))
    return also + (f" (default: {values})" if values else "")


def _member(family: type[Family], given: Mapping[str, Any]) -> Any:
    """Returns the member that the flags choose. Raises UsageError for a flag that belongs to another."""
    known = {each.kind: {*_fields(each), each.kind} for each in members(family)}
    chosen = [kind for kind in known if kind in given]
    if len(chosen) > 1:
        raise UsageError(f"{' and '.join(map(_dashed, chosen))} exclude each other")
    kind = chosen[0] if chosen else family.default_kind
    for name in given:
        if name not in known[kind]:
            others = " or ".join(_dashed(other) for other, names in known.items() if name in names)
            where = f"with {_dashed(kind)}" if chosen else f"without {others}"
            raise UsageError(f"{_dashed(name)} does nothing {where}")
    cls = family.kinds[kind]
    fields = _fields(cls)
    missing = [
        name for name, field in fields.items() if field.default is dataclasses.MISSING and name not in given
    ]
    if missing:
        raise UsageError(f"{_dashed(kind)} needs {_dashed(missing[0])}")
    values = {name: given[name] for name in fields if name in given}
    try:
        return cls(**{name: tuple(v) if isinstance(v, list) else v for name, v in values.items()})
    except ValueError as error:
        raise UsageError(str(error)) from None


def _fields(member: type[Family]) -> dict[str, dataclasses.Field[Any]]:
    found: Any = member
    return {field.name: field for field in dataclasses.fields(found) if field.name != "kind"}


def _is_family(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Family) and "kinds" in kind.__dict__


def _dashed(name: str) -> str:
    return f"--{name.replace('_', '-')}"


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
        if _is_family(kind):
            given = {flag[1:]: value for flag, value in values.items() if flag.startswith(".")}
            found[name] = _member(kind, given)
        elif dataclasses.is_dataclass(kind):
            assert isinstance(kind, type)
            found[name] = _build(kind, values)
        else:
            found[name] = tuple(values[name]) if isinstance(values[name], list) else values[name]
    return flags(**found)


def positive(text: str) -> float:
    """Reads a finite number above 0."""
    value = float(text)
    if not 0 < value < math.inf:
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

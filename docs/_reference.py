"""Makes the reference pages from the code while mkdocs builds the site, which calls it as a hook."""

import importlib
import inspect
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from io import StringIO
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import moe
import orchestrator
from jobs._list import description, models, scales, sweeps
from jobs._main import COMMANDS
from moe.codec import dataclasses_of, hints_of, to_dict
from moe.guests import join_families
from orchestrator.config import RunConfig
from orchestrator.costs import known_costs
from orchestrator.tasks import TaskConfig
from orchestrator.training.metrics import described_metrics

join_families()  # their fields and metrics are in the reference too

HELP_WIDTH = "92"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the generated pages; mkdocs calls it before it reads the others."""
    pages = {"config": config_page, "commands": commands_page, "metrics": metrics_page}
    for name, make in (pages | {"sweeps": sweeps_page, "api": api_page}).items():
        files.append(File.generated(config, f"reference_{name}.md", content=make()))
    return files


def config_page() -> str:
    lines = [
        "# Fields of a run",
        "Every field that `--set FIELD=VALUE` of `jobs/train.py` and `jobs/pareto_sweep.py` changes, with its"
        " type and the default of `train.py`. `--set help` of a command prints the fields with its own"
        " defaults. Where a group has several kinds, `kind` chooses one of them, whose fields then start"
        " from their defaults.",
        *config_lines(RunConfig(), ""),
    ]
    return "\n\n".join(lines)


def config_lines(config: Any, path: str, within: tuple[type, ...] = ()) -> Iterator[str]:
    """The fields of a config, and below them its groups, except those of a class that it lies within."""
    within = (*within, type(config))
    hints, meaning, groups, rows = hints_of(type(config)), meanings(type(config)), [], []
    for name, hint in hints.items():
        if name == "kind":
            continue
        value, members = getattr(config, name), dataclasses_of(hint)
        others = [member for member in members if member not in within]
        groups += [(value if isinstance(value, member) else member(), f"{path}{name}.") for member in others]
        if path + name == "storage":  # its default depends on the machine
            shown = f"`{type_name(hint)}`"
        elif not members:
            shown = f"`{type_name(hint)} = {json.dumps(to_dict(value))}`"
        elif value is None:
            shown = f"null, or the group `{path}{name}`"
        else:
            shown = f"the group `{path}{name}`"
        rows.append(f"- **{path}{name}** {shown}" + ("" if members else f"<br>{meaning[name]}"))
    yield f"## {path.rstrip('.') or 'The run'}" + (f" of kind {config.kind}" if "kind" in hints else "")
    yield summary(type(config))
    yield "\n".join(rows)
    for group, inner in groups:
        yield from config_lines(group, inner, within)


def type_name(hint: Any) -> str:
    """The type as a user writes its values: the words of a Literal, `null` for None."""
    if get_origin(hint) is Literal:
        return " | ".join(map(str, get_args(hint)))
    if get_origin(hint) is tuple:
        return f"list of {type_name(get_args(hint)[0])}"
    if members := get_args(hint):
        return " | ".join(type_name(member) for member in members)
    return "null" if hint is NoneType else hint.__name__


def summary(cls: type) -> str:
    """The docstring without its section of attributes."""
    return inspect.cleandoc(cls.__doc__ or "").partition("Attributes:\n")[0]


def meanings(cls: type) -> dict[str, str]:
    """The text of each field in the sections `Attributes` of a class and of those that it inherits from."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        section = inspect.cleandoc(base.__doc__ or "").partition("Attributes:\n")[2]
        for names, text in re.findall(r"^    ([\w, ]+): (.+(?:\n {8}.+)*)", section, re.MULTILINE):
            found |= dict.fromkeys(names.split(", "), re.sub(r"\bNone\b", "`null`", " ".join(text.split())))
    return found


def commands_page() -> str:
    lines = ["# Commands", "What `--help` of each command prints."]
    os.environ["COLUMNS"] = HELP_WIDTH
    for name, module in sorted(COMMANDS.items()):
        lines += [f"## {name}", f"```text\n{help_of(module)}```"]
    return "\n\n".join(lines)


def help_of(module: str) -> str:
    job, text, argv = importlib.import_module(module), StringIO(), sys.argv
    sys.argv = [f"{module.rpartition('.')[2]}.py", "--help"]
    try:
        with redirect_stdout(text), suppress(SystemExit):
            job.main()
    finally:
        sys.argv = argv
    return text.getvalue()


def metrics_page() -> str:
    metrics = {name: (cost.unit, cost.meaning) for name, cost in known_costs().items()} | described_metrics()
    for task in TaskConfig.kinds.values():
        metrics |= task.described
    rows = (f"| `{name}` | {unit} | {meaning} |" for name, (unit, meaning) in metrics.items())
    return "\n".join(
        [
            "# Metrics",
            "",
            "Names in `metrics.jsonl` of a run and in MLflow. The step axis of MLflow is images seen.",
            "",
            "| metric | unit | meaning |",
            "|---|---|---|",
            *rows,
        ]
    )


def sweeps_page() -> str:
    columns, rows = sweeps("tiny")
    lines = [
        "# Sweeps, scales, models",
        "What `--sweep`, `--scale` and `--model` name; `python jobs/pareto_sweep.py --list` prints it too.",
        "## Sweeps",
        table(columns, [(f"[{name}](#{name})", *rest) for name, *rest in rows]),
        "## Scales",
        "The numbers before a sweep's own recipe.",
        table(*scales()),
        "## Models",
        "The models of the papers, with ImageNet's classes.",
        table(*models()),
        "## Each sweep",
    ]
    for name, *_ in rows:
        lines += [f"### {name} {{ #{name} }}", description(name)]
    return "\n\n".join(lines)


def table(columns: Any, rows: Any) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def api_page() -> str:
    lines = ["# Python API", "What `orchestrator` and `moe` export."]
    for package in (orchestrator, moe):
        lines.append(f"## {package.__name__}")
        lines += [f"::: {package.__name__}.{name}" for name in package.__all__]
    return "\n\n".join(lines)

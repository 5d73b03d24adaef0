"""The command `moe-frontier`: its first word names a file of this folder or of a guest, others are flags."""

import ast
import importlib
import re
import sys
from importlib.util import find_spec
from pathlib import Path

from moe.config import did_you_mean
from moe.guests import offered

SHORT = {"pack_shards": "pack", "pareto_sweep": "sweep"}  # the other commands are called after their files
COMMANDS = {  # command -> its module, those of guests last
    SHORT.get(path.stem, path.stem.replace("_", "-")): f"jobs.{path.stem}"
    for path in Path(__file__).parent.glob("[a-z]*.py")
} | offered("COMMANDS")


def main() -> None:
    """Runs a command. The exit code is its own, 2 for a command that does not exist."""
    name, *flags = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print(overview())
    elif name not in COMMANDS:
        hint = did_you_mean(name, COMMANDS, str) or "; moe-frontier --help lists all"
        print(f"error: unknown command {name!r}{hint}", file=sys.stderr)
        sys.exit(2)
    else:
        # Usage lines and MLflow show the command under this name.
        sys.argv = [f"moe-frontier {name}", *flags]
        job = importlib.import_module(COMMANDS[name])
        job.__doc__ = re.sub(r"(?:python )?(?:\w+/)*jobs/(\w+)\.py", spelled, job.__doc__ or "")
        job.main()


def overview() -> str:
    """Returns the commands with a line each, the first of their docstrings; loads none of them."""
    width = max(map(len, COMMANDS))
    lines = ["usage: moe-frontier COMMAND [flags]", ""]
    for name in sorted(COMMANDS):
        spec = find_spec(COMMANDS[name])
        assert spec
        assert spec.origin
        doc = " ".join((ast.get_docstring(ast.parse(Path(spec.origin).read_text())) or "").split())
        lines.append(f"  {name:{width}}  {re.split('[.:;] ', doc)[0].rstrip('.')}")
    return "\n".join([*lines, "", "moe-frontier COMMAND --help prints the flags of a command."])


def spelled(file: re.Match[str]) -> str:
    """Returns the command that a mention of its file stands for."""
    return "moe-frontier " + next(name for name, module in COMMANDS.items() if module.endswith(f".{file[1]}"))

"""The command `moe-frontier`: its first word names a file of this folder, the others are flags for that."""

import ast
import importlib
import re
import sys
from pathlib import Path

from jobs._flags import near

OLD = {  # former names, which go with the next version -> the command and the flags that do the same now
    "cost": ("plan", "--cost"),
    "doctor": ("plan", "--check"),
    "fewshot": ("evaluate", "--shots", "1,5,10,25"),
    "operating_points": ("evaluate", "--grid", "--repeats", "5"),  # --grid takes what follows it up to a flag
    "soup": ("export",),
}
SHORT = {"pack_shards": "pack", "pareto_sweep": "sweep"}  # the other commands are called after their files
FILES = {
    SHORT.get(path.stem, path.stem.replace("_", "-")): path
    for path in Path(__file__).parent.glob("[a-z]*.py")
    if path.stem not in OLD
}


def main() -> None:
    """Runs a command. The exit code is its own, 2 for a command that does not exist."""
    name, *flags = sys.argv[1:] or ["--help"]
    if now := OLD.get(name.replace("-", "_")):
        print(f"moe-frontier {name} is now: moe-frontier {' '.join(now)}", file=sys.stderr)
        name, *flags = [*now, *flags]
    if name in ("-h", "--help"):
        print(overview())
    elif name not in FILES:
        hint = near(name, FILES) or "; moe-frontier --help lists all"
        print(f"error: unknown command {name!r}{hint}", file=sys.stderr)
        sys.exit(2)
    else:
        # Usage lines and MLflow show the command under this name.
        sys.argv = [f"moe-frontier {name}", *flags]
        job = importlib.import_module(f"jobs.{FILES[name].stem}")
        job.__doc__ = re.sub(r"(?:python )?jobs/(\w+)\.py", spelled, job.__doc__ or "")
        job.main()


def run_old(name: str) -> None:
    """Runs the file that does now what the file `name` did. Says so on stderr: stdout may be read."""
    now, *flags = OLD[name]
    print("jobs/{}.py is now: {}".format(name, " ".join([f"jobs/{now}.py", *flags])), file=sys.stderr)
    sys.argv = [str(Path(sys.argv[0]).with_name(f"{now}.py")), *flags, *sys.argv[1:]]
    importlib.import_module(f"jobs.{now}").main()


def overview() -> str:
    """Returns the commands with a line each, the first of their docstrings; loads none of them."""
    width = max(map(len, FILES))
    lines = ["usage: moe-frontier COMMAND [flags]", ""]
    for name in sorted(FILES):
        doc = " ".join((ast.get_docstring(ast.parse(FILES[name].read_text())) or "").split())
        lines.append(f"  {name:{width}}  {re.split('[.:;] ', doc)[0].rstrip('.')}")
    return "\n".join([*lines, "", "moe-frontier COMMAND --help prints the flags of a command."])


def spelled(file: re.Match[str]) -> str:
    """Returns the command that a mention of its file stands for."""
    return "moe-frontier " + next(name for name, path in FILES.items() if path.stem == file[1])

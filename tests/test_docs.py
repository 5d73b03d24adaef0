"""The commands of README and docs: the tutorials run, and every other command at least parses.

A block that its page cannot run has a comment above it: <!-- needs: what it needs -->.
"""

import ast
import os
import re
import secrets
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from shutil import copytree, ignore_patterns
from typing import Any

import numpy as np
import pytest

import moe
import orchestrator
from jobs import evaluate
from moe.guests import PACKAGES
from orchestrator.costs import known_costs
from orchestrator.runs.metrics_file import read_metrics
from orchestrator.tasks import ClassificationConfig
from orchestrator.training.metrics import described_metrics
from tests.commands import check_settings, flags_of
from tests.parts import png

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "AGENTS", "SECURITY")),
    *sorted((ROOT / "docs").glob("*.md")),
]
TUTORIALS = (  # pages or sections: each line is run in one shell, in a copy of the project
    ("first_frontier.md", "../README.md"),
    ("own_images.md",),
    ("own_router.md",),
    ("own_parts.md",),
    ("cluster.md#one-machine",),
)
INSTEAD = {  # what a tutorial says -> what the test does in its COPY of the project
    "make sweep": "python jobs/pareto_sweep.py",
    "make cluster-local-stop": "cluster/local.sh stop",
    "make cluster-local": "cluster/local.sh start",
    "/tmp/moe-ray-$(id -u)": "$CLUSTER_DIR",
    "/tmp/demo": "COPY/demo",
    "/data/": "COPY/data/",
    "TrainConfig(steps=200)": "TrainConfig(steps=10)",
    "train.steps=500": "train.steps=10",
    "train.steps=200": "train.steps=10",
    "train.steps=300": "train.steps=10",
    "train.steps=100": "train.steps=10",
    "--name on-cluster": "--name on-cluster --set train.steps=10",
}
NEEDS = {  # programs on the other pages -> what they need
    "aws": "an account of AWS",
    "cluster/local.sh": "three nodes: the tutorial of cluster.md runs it",
    "cluster/mlflow/serve.sh": "a database",
    "cp": "a trained model",
    "curl": "a server",
    "docker": "Docker",
    "gcloud": "an account of Google Cloud",
    "helm": "Kubernetes",
    "kubectl": "Kubernetes",
    "mlflow": "a registered model",
    "pg_dump": "a database",
    "pip": "the network",
    "prometheus": "a cluster",
    "ray": "a cluster",
    "sudo": "a cluster",
}
SHELL = "cd date do done echo export for grep id printf set source umask unset"
LONG_RUN = ["jobs/train.py", "--model", "S/16", "--set", "train.steps=10000"]
BLOCK = re.compile(
    r'(?:<!-- needs: (?P<needs>[^>]+) -->\n\n?)?^```(?P<kind>\w+)(?: title="(?P<title>[^"]+)")?\n'
    r"(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    kind: str
    title: str | None
    text: str
    needs: str | None


def blocks(page: Path, anchor: str = "") -> list[Block]:
    return [Block(**found.groupdict()) for found in BLOCK.finditer(section(page, anchor))]


def section(page: Path, anchor: str) -> str:
    """The part of a page from the heading that `anchor` names to the next `##`; without one, all of it."""
    parts = re.split(r"^(?=## )", page.read_text(), flags=re.MULTILINE)
    if not anchor:
        return "".join(parts)
    (found,) = (part for part in parts if part.splitlines()[0].lower().replace(" ", "-") == f"##-{anchor}")
    return found


def commands(script: str) -> Iterator[list[str]]:
    """The words of each command; comments, redirections and assignments are left out.

    A line that begins with a flag is read as flags of `LONG_RUN`.
    """
    script = re.sub(r"\)/\S+", ")", script.replace("\\\n", " "))  # the rest of a word behind $(..)
    script = re.sub(r"(^|\s)#\s.*$", "", script, flags=re.MULTILINE)
    words = shlex.shlex(script, posix=True, punctuation_chars="();<>|&\n")
    words.whitespace, words.whitespace_split, words.commenters = " \t", True, ""
    command: list[str] = []
    skip = False
    for word in [*words, "\n"]:
        if skip or re.fullmatch(r"[<>]+", word):
            skip = not skip
        elif set(word) <= set("();|&\n"):
            if command:
                yield [*LONG_RUN, *command] if command[0].startswith("--") else command
            command = []
        elif command or not re.match(r"\w+=", word):
            command.append(word)


JOB = re.compile(rf"(({'|'.join(PACKAGES)})/)?jobs/\w+\.py")
# Pages with a command, a sweep or a format of the guests.
OF_GUESTS = ("cluster", "data", "early_stopping", "evaluation", "planning", "routers", "study", "sweeps")
OF_GUESTS += ("texts", "weights")


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.guests if page.stem in OF_GUESTS else (), id=page.name)
        for page in PAGES
    ],
)
def test_commands_parse_or_need_something_that_is_named(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(evaluate, "early", lambda name: ())  # a page's plugin would join for good
    Path("bench").symlink_to(ROOT / "bench")  # with a sweep of its own
    for block in blocks(page):
        if "def make" in block.text:
            Path(block.title or "my_sweep.py").write_text(block.text)
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    tutorial = any(page.name in Path("/".join(names)).parts for names in TUTORIALS)
    for block in blocks(page):
        if block.kind != "bash":
            continue
        for command in commands(block.text):
            program, rest = command[0], command[1:]
            job = next((word for word in command if JOB.fullmatch(word)), None)
            if job:
                words = command[command.index(job) + 1 :]
                try:
                    flags = flags_of(job.removesuffix(".py").replace("/", "."), words, monkeypatch)
                    if not tutorial:  # which may have made the field, as a router
                        check_settings(flags)
                except SystemExit as end:
                    pytest.fail(f"{page.name}: {shlex.join(command)}: exit code {end.code}")
            elif program == "make":
                assert set(rest) <= {*targets}, f"{page.name}: {shlex.join(command)}"
            elif program.endswith("python"):
                script = rest[0]
                known = script.startswith(("-", "$")) or (ROOT / script).is_file() or tutorial
                assert known, f"{page.name}: {shlex.join(command)}"
            else:
                known = program in NEEDS or program in SHELL.split() or block.needs or tutorial
                assert known, f"{page.name}: say in NEEDS what {program!r} needs, or mark the block"


def script(page: str, copy: Path) -> str:
    """The blocks of a page, or of its section behind `#`, as one shell script: commands, files, changes of
    files and pieces of Python.
    """
    lines = []
    name, _, anchor = page.partition("#")
    for block in blocks(ROOT / "docs" / name, anchor):
        if block.title:
            lines.append(f"cat > {block.title} <<'END_OF_FILE'\n{block.text}END_OF_FILE")
        elif block.kind == "diff":
            lines.append(f"git apply <<'END_OF_FILE'\n{block.text}END_OF_FILE")
        elif block.kind == "python":
            lines.append(f"python - <<'END_OF_FILE'\n{block.text}END_OF_FILE")
        elif block.kind == "bash" and not block.needs:
            lines.append(block.text)
    text = "\n".join(lines)
    for said, done in INSTEAD.items():
        text = text.replace(said, done.replace("COPY", str(copy)))
    return text


@pytest.mark.slow
@pytest.mark.parametrize("pages", TUTORIALS, ids=lambda pages: Path(pages[0]).stem)
def test_tutorials_run(pages: tuple[str, ...], tmp_path: Path) -> None:
    copy = tmp_path / "project"
    leave = ignore_patterns(".*", "__pycache__", "site")
    copytree(
        ROOT, copy, ignore=lambda at, names: leave(at, names) | ({"runs"} if Path(at) == ROOT else set())
    )
    (copy / ".venv").symlink_to(sys.prefix)
    # What README takes for the user's own: images by class, and photos.
    for number in range(240):
        for folder in (f"flowers/{'abc'[number % 3]}", "photos"):
            (copy / "data" / folder).mkdir(parents=True, exist_ok=True)
            image = png(np.full((8, 8), number))
            (copy / "data" / folder / f"{number}.png").write_bytes(image)
    cluster = tempfile.mkdtemp(prefix="ray")  # short: sockets lie in it
    Path(cluster, "token").write_text(secrets.token_hex(32))
    env = os.environ | {
        "PATH": f"{copy}/.venv/bin:{os.environ['PATH']}",
        "PYTHONPATH": str(copy),
        "MOE_FRONTIER_HOME": f"{copy}/runs",
        "CLUSTER_DIR": cluster,
        "RAY_AUTH_TOKEN_PATH": f"{cluster}/token",
    }
    try:
        for page in pages:
            done = subprocess.run(
                ["bash", "-euxo", "pipefail", "-c", script(page, copy)],
                cwd=copy,
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            print(done.stdout)
            assert done.returncode == 0, f"{page}: {done.stdout[-3000:]}"
    finally:
        subprocess.run([str(copy / "cluster/local.sh"), "stop"], env=env, check=True, capture_output=True)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_snippets_import_public_names_alone(page: Path) -> None:
    public = {"moe": moe.__all__, "orchestrator": orchestrator.__all__}
    for block in blocks(page):
        for line in re.finditer(r"\b(?:from|import) ((?:moe|orchestrator)\b[\w.]*)", block.text):
            assert line[1] in public, (
                f"{page.name}: {line[0]} ..; `{line[1].split('.')[0]}` exports what users need"
            )
        if block.kind == "python":
            for node in ast.walk(ast.parse(block.text)):
                if isinstance(node, ast.ImportFrom) and node.module in public:
                    names = {alias.name for alias in node.names}
                    assert names <= {*public[node.module]}, page.name


@pytest.mark.parametrize(
    ("page", "guest"),
    [
        ("own_router", "cosine"),
        ("own_parts", "convnet"),
        ("own_parts", "lion"),
        ("own_parts", "proportions"),
        ("own_parts", "wandb_tracker"),
    ],
)
def test_pages_show_the_guests_that_are_tested(page: str, guest: str) -> None:
    """`tests/jobs/test_plugins.py` trains them."""
    plugin = blocks(ROOT / f"docs/{page}.md")
    assert (ROOT / f"tests/own/{guest}.py").read_text() in [block.text for block in plugin if block.title]


@pytest.mark.parametrize("package", ["moe", "orchestrator"])
def test_the_map_of_the_code_is_whole(package: str) -> None:
    """How it works names every module, but those of folders with a file for each member, and no others."""
    text = (ROOT / "docs/how_it_works.md").read_text()
    rows = text.split(f"| in `{package}/` |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    for row in rows:
        for name in re.findall(r"`(\w+\.py)`", row):
            assert any(file.name == name for file in (ROOT / package).rglob("*.py")), f"there is no {name}"
    modules = [file for file in (ROOT / package).rglob("*.py") if file.stem != "__init__"]
    for module in modules:
        folder = module.relative_to(ROOT / package).parts[0]
        place = f"`{folder}`" if folder == module.name else f"`{folder}/`"
        (row,) = (row for row in rows if place in row.split("|")[1])
        many = "a file for each" in row or module.parent.name == "augment"
        assert many or f"`{module.name}`" in row, module


def test_features_of_a_model(trained_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The piece of Python in prediction.md, for another model and other images."""
    for number in range(3):
        (tmp_path / f"{number}.png").write_bytes(png(np.full((8, 8), number)))
    monkeypatch.setenv("MOE_FRONTIER_HOME", str(trained_home))
    (text,) = [b.text for b in blocks(ROOT / "docs/prediction.md") if "model.features" in b.text]
    found: dict[str, Any] = {}
    exec(text.replace("quickstart", "tiny").replace("/data/photos", str(tmp_path)), found)
    assert found["features"].shape == (3, 16)


def test_every_metric_is_described(trained_home: Path) -> None:
    files = [*trained_home.rglob("metrics.jsonl")]
    assert files
    names = {name for file in files for line in read_metrics(str(file.parent)) for name in line.metrics}
    assert names <= {*described_metrics(), *ClassificationConfig.described, *known_costs()}

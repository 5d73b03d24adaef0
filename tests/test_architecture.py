"""The import layers, enforced. Reads sources; imports none of them."""

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from moe.guests import offered

ROOT = Path(__file__).parent.parent
OURS = {"moe", "orchestrator", "papers", "wings", "jobs", "tests"}


def read(table: str) -> dict[str, set[str]]:
    """Reads lines of ``NAME: NAME NAME ..``; a line that is indented continues the one before."""
    rows = (line.partition(":") for line in table.replace("\n    ", " ").strip().splitlines())
    return {name: {*names.split()} for name, _, names in rows}


# Package or module: what of ours it may import; the longest match decides. orchestrator imports its public
# API, frontier.points the model, and costs the config, for type checkers alone.
ALLOWED = read("""
moe: moe
moe.init:
moe.config:
moe.guests:
moe.lazy:
moe.codec: moe.config moe.guests
moe.tokenizers: moe.config
moe.signature: moe.codec moe.config
moe.routing: moe.config moe.init moe.overrides
moe.overrides: moe.config moe.init
moe.experts: moe.dense moe.init moe.overrides moe.routing moe.rows
moe.rows: moe.init moe.routing
moe.expert_parallel: moe.experts moe.rows
moe.dense: moe.init
moe.routers: moe.config moe.init moe.overrides moe.routers moe.routing moe.rows
moe.routers.sparse_transport:
moe.routers.affinity: moe.config moe.init moe.routers.sparse_transport moe.routing
moe.routers.choice: moe.config moe.init moe.overrides moe.routers.affinity moe.routing moe.rows
moe.layer: moe.dense moe.config moe.experts moe.init moe.overrides moe.routers moe.routing
moe.upgrade:
moe.model: moe.config moe.experts moe.init moe.layer moe.overrides moe.routing
moe.trace: moe.layer moe.model
moe.batch_norm: moe.init moe.routing
moe.encoder: moe.config moe.dense moe.init moe.layer moe.model moe.overrides moe.routing
moe.models: moe.batch_norm moe.config moe.cost moe.dense moe.encoder moe.init moe.layer moe.model moe.models
    moe.overrides moe.routing moe.tokenizers
moe.cost: moe.experts moe.model moe.overrides moe.trace
moe.layout: moe.config moe.cost moe.experts moe.model
orchestrator: moe.lazy orchestrator
orchestrator.costs: moe.config moe.cost moe.model orchestrator.checkpoint.models orchestrator.config
orchestrator.config: moe orchestrator.costs orchestrator.data.augment orchestrator.names
    orchestrator.optimizers orchestrator.plugins orchestrator.schedules orchestrator.storage
    orchestrator.tasks
orchestrator.names:
orchestrator.output:
orchestrator.units: moe.guests orchestrator.costs orchestrator.output
orchestrator.optimizers: moe.config moe.experts moe.layout moe.model orchestrator.optimizers
orchestrator.schedules: moe.config
orchestrator.plugins: moe.config moe.guests orchestrator.storage
orchestrator.tasks: moe orchestrator.data.batch orchestrator.data.fields orchestrator.data.manifest
    orchestrator.data.text orchestrator.tasks
orchestrator.codec: moe.codec moe.config orchestrator.plugins
orchestrator.records: moe.codec moe.config orchestrator.codec orchestrator.config orchestrator.names
    orchestrator.plugins orchestrator.storage orchestrator.upgrade
orchestrator.upgrade: moe.upgrade
orchestrator.config_file: orchestrator.codec orchestrator.config orchestrator.storage orchestrator.upgrade
orchestrator.storage: orchestrator.stores
orchestrator.stores: orchestrator.credentials
orchestrator.credentials:
orchestrator.threads: moe.cost moe.model
orchestrator.tracking: moe orchestrator.checkpoint.models orchestrator.checkpoint.weights
    orchestrator.codec orchestrator.config orchestrator.costs orchestrator.data.images orchestrator.output
    orchestrator.records orchestrator.runs orchestrator.storage orchestrator.tasks orchestrator.tracking
orchestrator.tracking.served: moe.exported moe.signature orchestrator.data.batch orchestrator.data.images
    orchestrator.data.preparation
orchestrator.data: moe.config moe.signature moe.tokenizers orchestrator.config orchestrator.data
    orchestrator.plugins orchestrator.storage orchestrator.threads
orchestrator.data.plan:
orchestrator.data.batch:
orchestrator.data.fields:
orchestrator.data.text: moe.codec moe.tokenizers orchestrator.data.fields orchestrator.data.images
    orchestrator.storage
orchestrator.data.augment: moe.config orchestrator.data.augment
orchestrator.data.parquet: orchestrator.storage
orchestrator.data.images: moe.signature orchestrator.data.augment orchestrator.data.undecodable
orchestrator.data.undecodable:
orchestrator.packing: moe.codec moe.config moe.guests moe.tokenizers orchestrator.data orchestrator.packing
    orchestrator.plugins orchestrator.storage
orchestrator.packing.offsets:
orchestrator.packing.listing: orchestrator.data.images orchestrator.storage
orchestrator.packing.labels: moe.config.did_you_mean
orchestrator.packing.splits:
orchestrator.packing.samples: orchestrator.data.images orchestrator.data.index orchestrator.data.manifest
    orchestrator.packing.labels orchestrator.packing.splits
orchestrator.checkpoint.card: moe orchestrator.checkpoint.files orchestrator.codec orchestrator.config
    orchestrator.costs orchestrator.data orchestrator.units
orchestrator.checkpoint: moe orchestrator.checkpoint orchestrator.codec orchestrator.config
    orchestrator.data orchestrator.names orchestrator.plugins orchestrator.records orchestrator.storage
    orchestrator.tasks orchestrator.threads
orchestrator.training: moe orchestrator.checkpoint orchestrator.codec orchestrator.config
    orchestrator.config_file orchestrator.costs orchestrator.data orchestrator.output orchestrator.plugins
    orchestrator.records orchestrator.runs orchestrator.storage orchestrator.tasks orchestrator.threads
    orchestrator.training
orchestrator.training.train: orchestrator.codec orchestrator.config orchestrator.data orchestrator.estimate
    orchestrator.packing orchestrator.runs orchestrator.storage orchestrator.tracking orchestrator.training
orchestrator.training.console: orchestrator.config orchestrator.output
    orchestrator.runs
orchestrator.runs: moe.model orchestrator.checkpoint orchestrator.codec orchestrator.config
    orchestrator.config_file orchestrator.data orchestrator.plugins orchestrator.records orchestrator.runs
    orchestrator.storage orchestrator.upgrade
orchestrator.runs.notice:
orchestrator.estimate: moe orchestrator.checkpoint.manifest orchestrator.config
orchestrator.training.cleaner:
orchestrator.training.heartbeat:
orchestrator.frontier: orchestrator.costs orchestrator.frontier orchestrator.units
orchestrator.frontier.pareto:
orchestrator.frontier.points: moe.model orchestrator.frontier.pareto orchestrator.output
orchestrator.frontier.tables: orchestrator.costs orchestrator.frontier.frontier
    orchestrator.frontier.points orchestrator.units orchestrator.output
orchestrator.frontier.paired: orchestrator.frontier.points
orchestrator.frontier.claims: orchestrator.frontier.paired orchestrator.frontier.points
orchestrator.frontier.figure: orchestrator.costs orchestrator.frontier.points orchestrator.units
    orchestrator.output
orchestrator.frontier.drawing: orchestrator.frontier.figure orchestrator.units
orchestrator.frontier.published: moe.guests orchestrator.frontier
orchestrator.frontier.answer: orchestrator.costs orchestrator.frontier.points orchestrator.units
    orchestrator.output
orchestrator.inference: moe.codec moe.model moe.overrides orchestrator.checkpoint orchestrator.config
    orchestrator.costs orchestrator.inference orchestrator.plugins orchestrator.runs
orchestrator.inference.timing:
orchestrator.inference.reader:
orchestrator.inference.energy:
orchestrator.inference.clock: moe.exported orchestrator.inference.energy orchestrator.inference.timing
    orchestrator.plugins
orchestrator.inference.points: orchestrator.costs orchestrator.frontier orchestrator.inference.measure
orchestrator.sweeps: moe orchestrator
orchestrator.planning: moe orchestrator
orchestrator.evaluation: moe orchestrator.checkpoint orchestrator.codec orchestrator.config
    orchestrator.data orchestrator.evaluation orchestrator.packing.listing orchestrator.runs
    orchestrator.storage orchestrator.tasks orchestrator.threads orchestrator.tracking orchestrator.training
orchestrator.evaluation.base: moe.config orchestrator.checkpoint.models orchestrator.data.batch
    orchestrator.evaluation.sharded orchestrator.tracking.store
orchestrator.evaluation.kinds: moe orchestrator
papers: moe orchestrator papers wings
papers.jobs: jobs._cli jobs._flags jobs._record moe orchestrator papers
wings: moe orchestrator wings
wings.jobs: jobs._cli jobs._flags jobs._record jobs.train moe orchestrator wings
jobs: jobs._cli jobs._describe jobs._flags jobs._list jobs._main jobs._record
    jobs._sharded jobs._sweep_plan jobs.evaluate jobs.pack_shards jobs.pareto_sweep jobs.train moe
    orchestrator
jobs._flags: moe.config
jobs._main: moe.config moe.guests
jobs._cli: jobs jobs._flags jobs._signals orchestrator
jobs._signals: orchestrator.runs.notice
jobs._record: jobs._cli orchestrator
jobs._list: jobs._cli moe orchestrator
jobs._describe: moe orchestrator
jobs._sweep_plan: jobs._cli orchestrator
bench: moe orchestrator papers wings
""")
EVERYWHERE = "orchestrator.errors"  # imports nothing itself
# Library: where it may be imported.
LIBRARIES = read("""
ray: bench jobs orchestrator.data.ray_data orchestrator.evaluation.evaluate orchestrator.evaluation.predict
    orchestrator.evaluation.sharded
    orchestrator.sweeps.driver orchestrator.sweeps.engine orchestrator.planning.machines
    orchestrator.planning.preflight orchestrator.sweeps.scheduler
    orchestrator.training.cleaner orchestrator.training.cluster orchestrator.training.elastic
    orchestrator.training.gauges orchestrator.training.heartbeat orchestrator.training.launch
    orchestrator.training.resources orchestrator.training.torch_trainer
mlflow: orchestrator.tracking
boto3: orchestrator.stores
obstore: orchestrator.credentials orchestrator.stores
pyarrow.fs:
torch.distributed: bench moe.batch_norm moe.expert_parallel moe.layout moe.parallel orchestrator.checkpoint
    orchestrator.optimizers orchestrator.planning.machines orchestrator.training.dry_run
    orchestrator.training.metrics orchestrator.training.worker
argparse: bench jobs._flags
optuna: orchestrator.sweeps.answers orchestrator.sweeps.search
pkgutil: papers.jobs.study
matplotlib: orchestrator.frontier orchestrator.training.profile papers
plotly: orchestrator.frontier
rich: jobs orchestrator.sweeps.progress orchestrator.training.console
jinja2: orchestrator.frontier.page
tokenizers: moe.tokenizers
""")
# Beside the standard library, all that `moe` may need; byte pair encoding alone needs tokenizers.
ONLY_TORCH = {"torch", "numpy", "safetensors", "tokenizers"}


def under(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(f"{prefix}.")


def sources() -> Iterator[tuple[str, Path]]:
    for package in ("moe", "orchestrator", "papers", "wings", "jobs", "bench"):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(p for p in parts if p != "__init__"), path


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def imports(path: Path) -> Iterator[str]:
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def libraries() -> Iterator[tuple[str, Path]]:
    return (
        (m, path)
        for m, path in sources()
        if m.split(".")[0] in ("moe", "orchestrator", "papers", "wings") and ".jobs" not in m
    )


def test_layers() -> None:
    for module, path in sources():
        allowed = ALLOWED[max((rule for rule in ALLOWED if under(module, rule)), key=len)]
        for name in imports(path):
            if name.split(".")[0] in OURS and not under(name, EVERYWHERE):
                assert any(under(name, prefix) for prefix in allowed), f"{module} may not import {name}"
            for library, homes in LIBRARIES.items():
                if under(name, library):
                    assert any(under(module, home) for home in homes), f"{module} may not import {library}"


def test_moe_needs_torch_alone() -> None:
    for module, path in sources():
        if under(module, "moe"):
            tops = {name.split(".")[0] for name in imports(path)} - {"moe"}
            assert tops <= ONLY_TORCH | sys.stdlib_module_names, module


def test_only_jobs_import_inside_functions() -> None:
    """Commands answer `--help` before large libraries are loaded, and so do evaluations, whose fields are
    flags; the clock holds no library but the one that it measures. Elsewhere our imports stand at the top.
    """
    light = (
        "orchestrator.evaluation.kinds",
        "orchestrator.inference.clock",
        *offered("EVALUATIONS").values(),
    )
    for _, path in [(m, path) for m, path in libraries() if not m.startswith(light)]:
        functions = (node for node in nodes(path) if isinstance(node, ast.FunctionDef))
        inside = [n for f in functions for n in ast.walk(f) if isinstance(n, ast.ImportFrom)]
        assert not inside, f"{path}:{inside[0].lineno}"


def test_the_core_names_no_guest() -> None:
    """Outside `moe.guests`, which has the one list: the core is whole without wings and papers."""
    for module, path in sources():
        if module.split(".")[0] in ("moe", "orchestrator", "jobs"):
            assert not any(under(name, guest) for name in imports(path) for guest in ("wings", "papers")), (
                module
            )


def test_only_jobs_print() -> None:
    """The library's progress, for callers that want it, goes through rich. Files that are processes of their
    own print what they find.
    """
    programs = {f"orchestrator.inference.{name}" for name in ("clock", "reader", "writer")}
    for module, path in (each for each in libraries() if each[0] not in programs):
        calls = (node for node in nodes(path) if isinstance(node, ast.Call))
        assert not any(isinstance(call.func, ast.Name) and call.func.id == "print" for call in calls), module


def test_the_library_knows_no_flags() -> None:
    """Its messages name settings, as `fresh`, which commands write as --fresh; other programs keep theirs."""
    for module, path in sources():
        docs = {id(node.value) for node in nodes(path) if isinstance(node, ast.Expr)}
        for node in nodes(path) if module.split(".")[0] in ("moe", "orchestrator") else ():
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
                text = re.sub(r"(ray job submit|pip install) [-\w .]+", "", node.value)
                assert not re.search(r"(?<![\w-])--[a-z]", text), f"{module}: {node.value}"


def test_configs_check_themselves() -> None:
    """A dataclass that is called a config derives from `moe.config.Config`, or from another config."""
    for module, path in sources():
        for node in nodes(path):
            if isinstance(node, ast.ClassDef) and node.name.endswith(("Config", "Options", "Overrides")):
                bases = [ast.unparse(base) for base in node.bases]
                assert any(base.endswith(("Config", "Family")) for base in bases) or node.name == "Config", (
                    f"{module}.{node.name} is not a Config"
                )


def test_configs_are_frozen() -> None:
    for module, path in sources():
        for node in nodes(path):
            for decorator in getattr(node, "decorator_list", []):
                if isinstance(node, ast.ClassDef) and "dataclass" in ast.unparse(decorator):
                    assert "frozen=True" in ast.unparse(decorator), f"{module}.{node.name}"


def test_a_config_answers_for_itself() -> None:
    """Nobody asks a config of a family which one it is: what others need to know is a method of it."""
    for module, path in libraries():
        for node in nodes(path):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
                guest, asked = module.split(".")[0] in ("papers", "wings"), ast.unparse(node.args[1])
                assert guest or not re.search(r"[A-Z]\w+Config\b", asked), f"{module}: {ast.unparse(node)}"


def test_one_name_one_meaning() -> None:
    """No two public classes, functions or types of the library share a name, unless they are the same type.

    A command is called as the function that it is about (`jobs/train.py`), so commands are left out.
    """
    homes: dict[str, tuple[str, str]] = {}
    for module, path in sources():
        if module.split(".")[0] in ("moe", "orchestrator"):
            for node in ast.parse(path.read_text()).body:
                name, text = "_", module
                if isinstance(node, ast.ClassDef | ast.FunctionDef):
                    name = node.name
                elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                    name, text = node.targets[0].id, ast.unparse(node.value)
                if re.match("[a-z]|[A-Z].*[a-z]", name) and name != "log":
                    other, same = homes.setdefault(name, (module, text))
                    assert text == same, f"{name} is in {other} and in {module}"

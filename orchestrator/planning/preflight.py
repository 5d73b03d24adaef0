"""Checks of a sweep before it starts: its data, its storage, its tracking store, and the cluster's nodes.

On one node all checks run in this process; on several nodes one task per node looks at its machine.
"""

import hashlib
import math
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any
from uuid import uuid4

import pynvml
import ray
import torch

from moe.config import did_you_mean
from orchestrator import storage
from orchestrator.costs import known_costs
from orchestrator.data.manifest import open_manifest
from orchestrator.errors import UsageError
from orchestrator.estimate import GIB, layout, memory_problem
from orchestrator.frontier.claims import EVERY_POINT, comparisons, parse_claim, why_nothing
from orchestrator.frontier.points import Point
from orchestrator.planning.findings import Finding, run_check
from orchestrator.planning.machines import check_machines
from orchestrator.sweeps.sweep import Sweep, Trial, settings
from orchestrator.tracking.store import Tracking
from orchestrator.training.fit import check_data, check_start
from orchestrator.training.metrics import MORE_IS_BETTER, described_metrics
from orchestrator.training.resources import check_resources, most_resources, node_name, on_every_node

SOURCES = Path(__file__).parents[2]
SAME_VERSIONS = (
    "Install the same versions on every node: pip install --constraint constraints.txt --editable .;"
    " send the code with `ray job submit --working-dir .`"
)


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """Software and devices of a node.

    Attributes:
        versions: of Python, of libraries, and of this project's sources.
        gpus: GPUs that NVIDIA's driver shows, and `gpu_gib` the memory of the smallest.
        cuda: whether torch was built for GPUs.
        storage_problem: why the sweep's files cannot be read or written; empty if they can.
        data: digest of the data set's manifest, or why it cannot be read.
    """

    versions: Mapping[str, str]
    gpus: int
    gpu_gib: float
    cuda: bool
    storage_problem: str
    data: str


Nodes = Mapping[str, NodeFacts]
Resources = Mapping[str, Mapping[str, float]]  # of every node, as Ray counts them


def preflight(
    sweep: Sweep,
    *,
    connect: Callable[[], None],
    open_store: Callable[[], Tracking],
    retrain: bool = False,
    verify: bool = False,
    machines: bool = False,
) -> list[Finding]:
    """Runs all checks. The cluster is joined only if all checks that need none have passed.

    Args:
        connect: joins or starts the Ray cluster.
        open_store: opens the tracking store for writing, as the sweep does.
        retrain: whether the best arm will be trained again.
        verify: also compare the SHA-256 of all shards.
        machines: also measure the network between nodes, and look at their clocks and disks.
    """
    base = sweep.base
    findings = [
        run_check("sweep", lambda: _check_sweep(sweep, verify=verify)),
        run_check("storage", lambda: _check_storage(base.storage)),
        run_check("tracking", lambda: _check_tracking(open_store)),
    ]
    if not all(finding.ok for finding in findings):
        return findings
    connect()
    alive = [node for node in ray.nodes() if node["Alive"]]
    try:
        nodes = _look_at(alive, base.storage, base.data.path)
    except UsageError as error:
        return [*findings, Finding(check="nodes", ok=False, message=str(error))]
    declared = {node_name(node): node["Resources"] for node in alive}
    return [
        *findings,
        run_check("versions", lambda: check_versions(nodes)),
        run_check("shared files", lambda: check_shared_files(nodes, base.storage, base.data.path)),
        run_check("GPUs", lambda: check_gpus(nodes, declared, wanted=base.scale.use_gpu)),
        run_check("trials", lambda: check_trials(sweep, nodes, declared, retrain=retrain)),
        *(check_machines(alive, use_gpu=base.scale.use_gpu) if machines else ()),
    ]


def check_sweep(sweep: Sweep, *, verify: bool = False) -> None:
    """Checks what needs no cluster. With `verify` all shards are read.

    Raises:
        UsageError: for an arm that is refused, a claim about what the arms do not have, data that is not
            whole, or weights to start from that do not fit.
    """
    check_metrics(sweep)
    check_claims(sweep)
    check_data(sweep.base, verify=verify)
    for name, run in sweep.runs().items():
        try:
            check_start(run)
        except UsageError as error:
            raise UsageError(f"arm {name}: {error}") from None


def check_metrics(sweep: Sweep) -> None:
    """Raises UsageError for a quality or a cost that no trial will report, or a cost of which more is better.
    A cost is a `Cost`, or any metric of the runs.
    """
    task, fewshot, costs = sweep.base.task, sweep.base.train.fewshot, known_costs()
    qualities = (*task.qualities, *(fewshot.metrics() if fewshot else ()))
    if sweep.quality not in qualities:
        raise UsageError(f"quality={sweep.quality!r} of a sweep is none of {', '.join(qualities)}")
    if sweep.cost in (*qualities, *MORE_IS_BETTER):
        raise UsageError(f"cost={sweep.cost!r} of a sweep is to be minimised, and more of it is better")
    if sweep.cost not in (known := [*costs, *described_metrics(), *task.described]):
        near = did_you_mean(sweep.cost, known)
        raise UsageError(
            f"cost={sweep.cost!r} of a sweep is none of {', '.join(costs)}, and no metric of its runs{near}"
        )


def check_claims(sweep: Sweep) -> dict[str, int]:
    """Returns claim -> the number of its comparisons; empty for a search, which has no arms yet.

    Raises:
        UsageError: for a claim that cannot be read, names what no arm has, or compares none of the arms.
    """
    trials = {trial.arm: trial for trial in sweep.trials().values() if trial.role == "trial"}
    points = [_planned(trial) for trial in trials.values()]
    known = {*EVERY_POINT} | {name for point in points for name in point.settings}
    counts = dict[str, int]()
    for text in sweep.claims:
        try:
            claim = parse_claim(text)
        except ValueError as error:
            raise UsageError(str(error)) from None
        if not points:
            continue
        if unknown := claim.settings() - known:
            raise UsageError(f"claim {text!r} names {sorted(unknown)}; the arms have {sorted(known)}")
        try:
            counts[text] = len(comparisons(claim, points))
        except ValueError as error:
            raise UsageError(f"claim {text!r}: {error}") from None
        if not counts[text]:
            raise UsageError(f"claim {text!r} compares nothing: {why_nothing(claim, points)}")
    return counts


def _planned(trial: Trial) -> Point:
    """The point that a trial will be."""
    return Point(
        arm=trial.arm,
        family=trial.run.model.family(),
        cost=math.nan,
        quality=math.nan,
        size=math.nan,
        run_id=trial.name,
        status="running",
        settings=settings(trial.run),
    )


def unfit(sweep: Sweep) -> dict[str, str]:
    """trial -> why the connected cluster can never hold it; fitting trials are left out."""
    most, found = most_resources(), dict[str, str]()
    for name, run in sweep.runs().items():
        try:
            check_resources(run, most)
        except UsageError as error:
            found[name] = str(error)
    return found


def check_retrain(sweep: Sweep) -> None:
    """Raises UsageError, before anything is trained, if arms could not be retrained."""
    if sweep.trunk:
        raise UsageError("cooldown branches are not retrained: use `retrain` 0")


def _check_sweep(sweep: Sweep, *, verify: bool) -> str:
    check_sweep(sweep, verify=verify)
    manifest, trials = open_manifest(sweep.base.data.path), len(sweep.runs())
    rows = ", ".join(f"{manifest.rows(split)} {split}" for split in manifest.splits)
    return f"{trials or 'drawn'} trials; {sweep.base.data.path}: {rows} images, all shards are there"


def _check_storage(root: str) -> str:
    if problem := _storage_problem(root):
        raise UsageError(f"{root} cannot be used: {problem}. Name another place with `storage`")
    return f"{root}: written, read and deleted"


def _check_tracking(open_store: Callable[[], Tracking]) -> str:
    open_store()
    return "the MLflow store answers and can be written to"


def _storage_problem(root: str, marker: str | None = None) -> str:
    """Why `root` cannot be written to, or the driver's file `marker` not be seen; empty if both can."""
    own = storage.join(root, f".preflight-{uuid4().hex}")
    try:
        if marker and storage.size(marker) is None:
            return "does not see what the driver wrote"
        storage.write_bytes(own, b"written")
        try:
            return "" if storage.read_bytes(own) == b"written" else "files do not read as they were written"
        finally:
            storage.delete(own)
    except UsageError as error:
        return str(error)
    except OSError as error:
        return error.strerror or str(error).splitlines()[0]


def _look_at(alive: list[dict[str, Any]], root: str, data: str) -> dict[str, NodeFacts]:
    """The facts of every node that is up.

    Raises:
        UsageError: naming the nodes whose process failed.
    """
    marker = storage.join(root, f".preflight-{uuid4().hex}")
    storage.write_bytes(marker, b"")
    try:
        if len(alive) == 1:  # the node of this process
            return {node_name(alive[0]): examine(root, marker, data)}
        found = on_every_node(examine, root, marker, data)
    finally:
        storage.delete(marker)
    silent = {name: str(answer) for name, answer in found.items() if isinstance(answer, TimeoutError)}
    _refuse(silent, found, "These nodes hang or are too busy: try again, or remove them")
    _refuse(
        {n: str(e).strip().splitlines()[-1] for n, e in found.items() if isinstance(e, Exception)},
        found,
        SAME_VERSIONS,
    )
    return found


def examine(root: str, marker: str, data: str) -> NodeFacts:
    """The facts of the node that this process is on. Runs in a Ray task."""
    gpus, gpu_gib = _gpus()
    try:
        digest = open_manifest(data).digest()
    except (UsageError, OSError) as error:
        digest = str(error)
    return NodeFacts(
        versions=_versions(),
        gpus=gpus,
        gpu_gib=gpu_gib,
        cuda=torch.version.cuda is not None,
        storage_problem=_storage_problem(root, marker),
        data=digest,
    )


def _versions() -> dict[str, str]:
    sources = hashlib.sha256()
    for package in ("moe", "orchestrator"):
        for path in sorted((SOURCES / package).rglob("*.py")):
            sources.update(str(path.relative_to(SOURCES)).encode() + path.read_bytes())
    libraries = {name: version(name) for name in ("torch", "ray")}
    return {"python": platform.python_version()} | libraries | {"our code": sources.hexdigest()[:8]}


def _gpus() -> tuple[int, float]:
    """GPUs that NVIDIA's driver shows, whatever Ray hides from this process; memory of the smallest."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return 0, 0.0
    handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    sizes = [int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) / GIB for handle in handles]
    pynvml.nvmlShutdown()
    return len(sizes), min(sizes, default=0.0)


def check_versions(nodes: Nodes) -> str:
    """All nodes against this process. Raises UsageError."""
    here = _versions()
    differences = {
        name: ", ".join(f"{k} {v}, here {here[k]}" for k, v in node.versions.items() if v != here[k])
        for name, node in nodes.items()
    }
    _refuse(differences, nodes, SAME_VERSIONS)
    return ", ".join(f"{name} {value}" for name, value in here.items()) + f" on {_count(nodes)}"


def check_shared_files(nodes: Nodes, root: str, data: str) -> str:
    """Every node sees the driver's files, can write files, and reads the same data set. Raises UsageError."""
    blind = {name: node.storage_problem for name, node in nodes.items()}
    _refuse(
        blind,
        nodes,
        f"{root} is not shared by all nodes: use `storage` s3://bucket/prefix (gs://, az://) or a mount",
    )
    digest = open_manifest(data).digest()
    other = {name: f"found {node.data}, here {digest}" for name, node in nodes.items() if node.data != digest}
    _refuse(other, nodes, f"{data} differs: name data that every node has with `data`")
    return f"{_count(nodes)} read and write {root}, and read the same data"


def check_gpus(nodes: Nodes, declared: Resources, *, wanted: bool) -> str:
    """Every node has the GPUs that Ray was started with, and torch can use them. Raises UsageError."""
    if not wanted:
        return "the sweep trains on CPUs"
    problems, counts = dict[str, str](), {name: declared[name].get("GPU", 0) for name in nodes}
    for name, node in nodes.items():
        if node.gpus < counts[name]:
            problems[name] = f"Ray has {counts[name]:g} GPUs, NVIDIA's driver {node.gpus}"
        elif counts[name] and not node.cuda:
            problems[name] = "torch was built without CUDA"
    _refuse(problems, nodes, "Start Ray with the GPUs that nvidia-smi lists, and install a torch with CUDA")
    return f"{sum(counts.values()):g} GPUs on {_count(nodes)}"


def check_trials(sweep: Sweep, nodes: Nodes, declared: Resources, *, retrain: bool) -> str:
    """Every trial fits the devices that the cluster has or may get, and their memory. Raises UsageError."""
    problems, use_gpu = unfit(sweep), sweep.base.scale.use_gpu
    device = "GPU" if use_gpu else "CPU"
    having = [name for name in nodes if declared[name].get(device)]
    room = [nodes[name].gpu_gib if use_gpu else declared[name]["memory"] / GIB for name in having]
    if most_resources().get(device, 0) > sum(declared[name][device] for name in having):
        room = []  # nodes that are still to come may have more memory
    for name, run in sweep.runs().items() if room else ():
        workers_per_device = 1 if use_gpu else -(-run.scale.workers // len(having))
        need = workers_per_device * layout(run, run.ep()).peak() / GIB
        if problem := memory_problem(need, max(room)):
            problems.setdefault(name, problem)
    for name, problem in problems.items():
        raise UsageError(f"{len(problems)} of {len(sweep.runs())} trials do not fit; {name}: {problem}")
    if retrain:
        check_retrain(sweep)
    return f"{len(sweep.runs()) or 'drawn'} trials fit {_count(nodes)}"


def _refuse(problems: Mapping[str, str], nodes: Mapping[str, Any], remedy: str) -> None:
    """Raises UsageError if a node has a problem."""
    bad = [f"{name}: {problem}" for name, problem in problems.items() if problem]
    if bad:
        raise UsageError(f"{len(bad)} of {_count(nodes)}: {'; '.join(bad)}. {remedy}")


def _count(nodes: Mapping[str, Any]) -> str:
    return f"{len(nodes)} node{'s' * (len(nodes) != 1)}"

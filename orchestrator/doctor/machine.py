"""What the machines of a cluster say, judged: versions, limits, memory, GPUs. Keys are names of nodes."""

import tomllib
from collections.abc import Mapping
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from orchestrator.doctor.facts import PACKAGES, Machine
from orchestrator.doctor.report import Finding, by_node, fail, ok, warn

OPEN_FILES = 8192  # Ray recommends it, and its launcher sets 65536
FEWEST_OPEN_FILES = 1024  # below it, sockets and shards fail to open in the middle of a run
FREE_MEMORY_FRAC = 0.1  # Ray ends workers at 0.05
FREE_DISK_FRAC = 0.05  # at which Ray stops to spill objects
GIB = 2**30

Machines = Mapping[str, Machine]


def check_versions(here: Machine, nodes: Machines, project: Path) -> Finding:
    """This process against pyproject.toml and constraints.txt of `project`; the nodes against it."""
    differ = {
        name: ", ".join(_differences(here, node)) for name, node in nodes.items() if _differences(here, node)
    }
    if differ:
        return fail(
            by_node(nodes, differ),
            "install the same everywhere: pip install --constraint constraints.txt --editable .",
        )
    told = f"python {here.python}, " + ", ".join(f"{n} {v}" for n, v in here.versions.items() if v)
    if wrong := _outside_bounds(here, project):
        return fail("; ".join(wrong), "pip install --constraint constraints.txt --editable .")
    if other := _not_as_tested(here, project):
        return warn("; ".join(other), "pip install --constraint constraints.txt --editable .")
    return ok(f"{told}; the same on {len(nodes)} nodes" if len(nodes) > 1 else told)


def check_shared_memory(nodes: Machines, object_store: Mapping[str, float]) -> Finding:
    """`object_store`: bytes that Ray has for objects, of each node."""
    small = {
        name: f"/dev/shm has {node.shm / GIB:.2f} GiB, the object store {object_store[name] / GIB:.2f} GiB"
        for name, node in nodes.items()
        if node.shm < object_store.get(name, 0)
    }
    if small:
        largest = max(object_store[name] for name in small)
        return warn(
            by_node(nodes, small),
            f"Ray keeps objects on disk there, slowly: docker run --shm-size={1.1 * largest / GIB:.1f}g, or a"
            " smaller --object-store-memory",
        )
    return ok("/dev/shm holds the object store")


def check_open_files(here: Machine, nodes: Machines) -> Finding:
    """Ray lifts a driver's soft limit up to the hard one; nobody lifts that of the nodes' processes."""
    limits = {"this process": here.open_files[1]} | {n: node.open_files[0] for n, node in nodes.items()}
    low = {name: f"ulimit -n is {limit}" for name, limit in limits.items() if 0 <= limit < OPEN_FILES}
    if not low:
        return ok(f"at least {min(limits.values())}")
    found, way_out = "; ".join(f"{n}: {why}" for n, why in low.items()), "ulimit -n 65536 before ray start"
    if any(0 <= limit < FEWEST_OPEN_FILES for limit in limits.values()):
        return fail(found, way_out)
    return warn(found, way_out)


def check_memory(nodes: Machines) -> Finding:
    full = {
        name: f"{node.memory_free / GIB:.1f} of {node.memory / GIB:.1f} GiB free"
        for name, node in nodes.items()
        if node.memory_free < FREE_MEMORY_FRAC * node.memory
    }
    if full:
        return warn(by_node(nodes, full), "Ray ends workers when 5 % are left: stop what else runs there")
    swapping = {n: f"{node.swap_used / GIB:.1f} GiB" for n, node in nodes.items() if node.swap_used > GIB}
    swap = f"; swap in use on {by_node(nodes, swapping)}" if swapping else ""
    return ok(f"at least {min(n.memory_free for n in nodes.values()) / GIB:.1f} GiB free{swap}")


def check_disk(nodes: Machines) -> Finding:
    full = {
        name: f"{node.disk_free_frac:.0%} free"
        for name, node in nodes.items()
        if node.disk_free_frac < FREE_DISK_FRAC
    }
    if full:
        way_out = "free space below the folder of temporary files, or ray start --temp-dir elsewhere"
        return warn(by_node(nodes, full), way_out)
    return ok(f"temporary files: at least {min(n.disk_free_frac for n in nodes.values()):.0%} free")


def check_threads(nodes: Machines) -> Finding:
    many = {
        name: f"OMP_NUM_THREADS={node.threads} with {node.cpus} CPUs"
        for name, node in nodes.items()
        if (node.threads or "").isdigit() and int(node.threads or 0) > node.cpus
    }
    if many:
        return warn(by_node(nodes, many), "unset OMP_NUM_THREADS: Ray gives each worker its share")
    told = {node.threads for node in nodes.values()}
    return ok(f"OMP_NUM_THREADS is {', '.join(sorted(t or 'unset, Ray sets it' for t in told))}")


def check_gpus(nodes: Machines, ray_gpus: Mapping[str, float], *, wanted: bool) -> Finding:
    """`ray_gpus`: of each node, as Ray counts them. `wanted`: whether the sweep trains on GPUs."""
    broken = {
        name: f"driver {node.gpus} GPUs (CUDA {node.cuda[0]}), torch {node.torch_gpus} (CUDA {node.cuda[1]})"
        for name, node in nodes.items()
        if node.gpus != (node.torch_gpus or 0)
    }
    if broken:
        way_out = "install a torch whose CUDA is not newer than the driver's, or a newer driver"
        return fail(by_node(nodes, broken), way_out)
    hidden = {
        name: f"{node.gpus} GPUs, Ray counts {ray_gpus.get(name, 0):g}"
        for name, node in nodes.items()
        if node.gpus != ray_gpus.get(name, 0)
    }
    if hidden:
        return warn(by_node(nodes, hidden), "ray start --num-gpus, or unset CUDA_VISIBLE_DEVICES before it")
    count = sum(node.gpus for node in nodes.values())
    if count and not wanted:
        return warn(f"{count} GPUs, and the sweep trains on CPUs", "--set scale.use_gpu=true")
    return ok(f"{count} GPUs" if count else "none, the sweep trains on CPUs")


def _differences(here: Machine, node: Machine) -> list[str]:
    pairs = [("python", node.python, here.python)]
    pairs += [(name, node.versions[name], here.versions[name]) for name in PACKAGES]
    return [f"{name} {theirs}, here {ours}" for name, theirs, ours in pairs if theirs != ours]


def _outside_bounds(here: Machine, project: Path) -> list[str]:
    missing = [f"{name} is not installed" for name, found in here.versions.items() if found is None]
    file = project / "pyproject.toml"
    if not file.exists():
        return missing
    told = tomllib.loads(file.read_text())["project"]
    bounds = {need.name: need.specifier for need in map(Requirement, told["dependencies"])}
    found = {name: version for name, version in here.versions.items() if version}
    wrong = [
        f"{name} {version} is not {bounds[name]}"
        for name, version in found.items()
        if name in bounds and not bounds[name].contains(version, prereleases=True)
    ]
    if not SpecifierSet(told["requires-python"]).contains(here.python):
        wrong.append(f"python {here.python} is not {told['requires-python']}")
    return missing + wrong


def _not_as_tested(here: Machine, project: Path) -> list[str]:
    file = project / "constraints.txt"
    pinned = dict(line.split("==") for line in file.read_text().split()) if file.exists() else {}
    return [
        f"{name} {version}, tested with {pinned[name]}"
        for name, version in here.versions.items()
        if version and name in pinned and version.partition("+")[0] != pinned[name]
    ]

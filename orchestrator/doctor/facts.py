"""What one machine says of itself, and of what it sees. All of it runs on every node: it imports little."""

import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from uuid import uuid4

import psutil
import pynvml

from orchestrator import storage

PACKAGES = ("ray", "torch", "torchvision", "mlflow", "pyarrow", "numpy", "optuna")
NETWORK_DISKS = ("nfs", "cifs", "smb", "lustre", "gluster", "ceph", "beegfs", "gpfs", "9p", "fuse.", "afs")
ASK_TORCH = "import torch; print(torch.cuda.device_count(), torch.version.cuda)"


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Attributes:
    versions: of `PACKAGES`; None: not installed.
    open_files: soft and hard limit of a process.
    gpus: that the driver shows; `torch_gpus` are those that torch can use; None: not asked, for there are
        none. `cuda`: versions of the driver's CUDA and of torch's.
    threads: OMP_NUM_THREADS. Sizes are bytes.
    """

    python: str
    versions: dict[str, str | None]
    cpus: int
    shm: int
    open_files: tuple[int, int]
    memory: int
    memory_free: int
    swap_used: int
    disk_free_frac: float
    threads: str | None
    gpus: int
    torch_gpus: int | None
    cuda: tuple[str, str]


def examine() -> Machine:
    """Of the machine that this process runs on."""
    gpus, driver_cuda = _driver()
    torch_gpus, torch_cuda = _torch() if gpus else (None, "")
    memory = psutil.virtual_memory()
    temporary = shutil.disk_usage(tempfile.gettempdir())
    return Machine(
        python=platform.python_version(),
        versions={name: _version(name) for name in PACKAGES},
        cpus=os.cpu_count() or 1,
        shm=shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else 0,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE),
        memory=memory.total,
        memory_free=memory.available,
        swap_used=psutil.swap_memory().used,
        disk_free_frac=temporary.free / temporary.total,
        threads=os.environ.get("OMP_NUM_THREADS"),
        gpus=gpus,
        torch_gpus=torch_gpus,
        cuda=(driver_cuda, torch_cuda),
    )


def now() -> float:
    """Of its clock: seconds since 1970."""
    return time.time()


def try_storage(root: str) -> None:
    """Writes a file below `root`, reads it back and deletes it. Raises OSError."""
    marker = storage.join(root, f".doctor-{uuid4().hex}")
    content = uuid4().bytes
    storage.write_bytes(marker, content)
    try:
        if storage.read_bytes(marker) != content:
            raise OSError(f"{marker} does not read as it was written")
    finally:
        storage.delete(marker)


def network_disk(path: str) -> str | None:
    """The kind of network disk that a local path lies on, as ``nfs4``; None on a disk of this machine."""
    real = os.path.realpath(path)
    disks = [
        (part.mountpoint, part.fstype)
        for part in psutil.disk_partitions(all=True)
        if os.path.commonpath([real, part.mountpoint]) == part.mountpoint
    ]
    kind = max(disks, key=lambda disk: len(disk[0]), default=("", ""))[1]
    return kind if kind.startswith(NETWORK_DISKS) else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _driver() -> tuple[int, str]:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return 0, ""
    cuda = pynvml.nvmlSystemGetCudaDriverVersion()
    count = pynvml.nvmlDeviceGetCount()
    pynvml.nvmlShutdown()
    return count, f"{cuda // 1000}.{cuda % 1000 // 10}"


def _torch() -> tuple[int, str]:
    """In a process of its own: Ray hides the GPUs from a task that asked for none."""
    env = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    asked = subprocess.run(
        [sys.executable, "-c", ASK_TORCH], env=env, capture_output=True, text=True, timeout=60
    )
    count, _, cuda = asked.stdout.strip().partition(" ")
    return (int(count), cuda) if asked.returncode == 0 else (0, first_error(asked.stderr))


def first_error(stderr: str) -> str:
    return stderr.strip().splitlines()[-1] if stderr.strip() else "unknown"

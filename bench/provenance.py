"""Where a figure comes from: hardware, load, versions and commit."""

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def provenance(*packages: str) -> dict[str, Any]:
    """Returns the origin of figures for a JSON file, with the versions of `packages`."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return {
        "hardware": f"{next(names, platform.processor())}, {os.cpu_count()} cores",
        "load_average": os.getloadavg(),
        "versions": {name: metadata.version(name) for name in sorted(packages)},
        "commit": _git("rev-parse", "HEAD").strip(),
        "changed": _git("status", "--short", "moe", "orchestrator", "bench"),
    }


def _git(*arguments: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True).stdout

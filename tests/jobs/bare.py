"""Commands in an environment that holds nothing but the project."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_bare(*args: str, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Runs Python with these arguments in the project's folder, without the caller's environment."""
    return subprocess.run(
        [sys.executable, *args],
        cwd=root,
        env={"PYTHONPATH": str(root), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

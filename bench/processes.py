"""Loaders as processes of their own: started, asked, looked at from outside."""

import json
import os
import re
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from bench.loaders import Job

ROOT = Path(__file__).parent.parent
CORES = os.cpu_count() or 1
LIMIT_S = 2.0
Record = dict[str, Any]


def start(job: Job, **pipes: Any) -> subprocess.Popen[str]:
    env = {key: value for key, value in os.environ.items() if "MALLOC" not in key}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "bench.loaders", json.dumps(asdict(job))]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=env, **pipes)


def run_loader(job: Job) -> Record:
    process = start(job)
    answer, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"failed: {job}")
    return json.loads(answer.splitlines()[-1])


class Limit:
    """The bare loop on all cores, in processes that wait between samples."""

    def __init__(self, data: Path) -> None:
        job = Job(loader="limit", path=str(data), images=0, cores=1)
        self.processes = [start(job, stdin=subprocess.PIPE) for _ in range(CORES)]
        for process in self.processes:
            self._answer(process)

    def sample(self) -> Record:
        for process in self.processes:
            assert process.stdin
            process.stdin.write(f"{time.monotonic() + 0.05} {LIMIT_S}\n")
            process.stdin.flush()
        answers = [self._answer(process) for process in self.processes]
        images, cpu = (sum(answer[key] for answer in answers) for key in ("images", "cpu_seconds"))
        return {"images_per_s": images / LIMIT_S, "cpu_ms_per_image": 1000 * cpu / images}

    def close(self) -> None:
        for process in self.processes:
            process.communicate()

    def _answer(self, process: subprocess.Popen[str]) -> Any:
        assert process.stdout
        return json.loads(process.stdout.readline())


def peak_bytes(process: subprocess.Popen[str]) -> int:
    """Of all its processes together; pages that several share count once (PSS)."""
    peak, root = 0, psutil.Process(process.pid)
    while process.poll() is None:
        total = 0
        for one in [root, *root.children(recursive=True)]:
            with suppress(OSError):
                rollup = Path(f"/proc/{one.pid}/smaps_rollup").read_text()
                total += sum(1024 * int(kib) for kib in re.findall(r"^Pss: +(\d+)", rollup, re.MULTILINE))
        peak = max(peak, total)
        time.sleep(0.3)  # looking costs time of the kernel
    return peak

"""What a sweep costs beside its training: 1,000 trials of one step each, the driver killed once midway.

  python bench/control_plane.py --trials 1000 --out bench/results/control-plane.json

Seconds per trial of the whole command, memory of the driver, size of Tune's own snapshots, MLflow's rows, and
how long the report takes to be built again from MLflow alone.
"""

import argparse
import json
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
SWEEP = """
from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.sweeps.sweep import Sweep

def make():
    fields = {{"name": "many", "train.steps": 1, "model.width": 16, "model.mlp_dim": 32, "model.depth": 1,
              "model.moe": None, "train.schedule.cooldown_steps": 0}}
    arms = {{f"arm{{i:04}}": {{"train.lr": 1e-4 * (1 + i)}} for i in range({trials})}}
    return Sweep(base=override(RunConfig(), fields), arms=arms)
"""


def start(home: Path) -> subprocess.Popen[bytes]:
    command = ["jobs/pareto_sweep.py", "--sweep", f"{home}/many.py:make", "--confirm", "0"]
    env = os.environ | {"MOE_FRONTIER_HOME": str(home), "PYTHONPATH": str(ROOT), "RAY_ADDRESS": "local"}
    with (home / "log.txt").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True
        )


def complete(home: Path) -> int:
    return len(list(home.glob("many/trials/*/result.json")))


def watch(driver: subprocess.Popen[bytes], home: Path, most: int, rss: dict[int, float]) -> None:
    """Until the driver ends, or `most` trials are complete; notes its memory in MiB at every hundred."""
    process = psutil.Process(driver.pid)
    while driver.poll() is None and (done := complete(home)) < most:
        try:
            rss.setdefault(done // 100 * 100, process.memory_info().rss / 2**20)
        except psutil.Error:
            return
        time.sleep(0.5)


def measure(trials: int, home: Path) -> dict[str, Any]:
    (home / "many.py").write_text(SWEEP.format(trials=trials))
    rss: dict[int, float] = {}
    began = time.monotonic()
    driver = start(home)
    watch(driver, home, trials // 2, rss)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    killed_at, first_s = complete(home), time.monotonic() - began
    time.sleep(5)  # its Ray goes with it
    began = time.monotonic()
    driver = start(home)
    process = psutil.Process(driver.pid)
    peak = 0.0
    while driver.poll() is None:
        try:
            peak = max(peak, process.memory_info().rss / 2**20)
        except psutil.Error:
            break
        time.sleep(0.5)
    code, second_s = driver.wait(), time.monotonic() - began
    if code:
        sys.exit((home / "log.txt").read_text()[-3000:])
    report_s = rebuild(home)
    store = sqlite3.connect(home / "mlflow.db")
    rows = {name: store.execute(f"select count(*) from {name}").fetchone()[0] for name in ("runs", "metrics")}
    snapshots = sum(file.stat().st_size for file in home.glob("many/tune/*") if file.is_file())
    return {
        "trials": trials,
        "killed at": killed_at,
        "seconds per trial": (first_s + second_s) / trials,
        "seconds per trial, before the kill": first_s / killed_at,
        "seconds per trial, after it": second_s / (trials - killed_at),
        "driver MiB": {str(at): round(size) for at, size in sorted(rss.items())},
        "driver MiB at most, after the kill": round(peak),
        "bytes of Tune's snapshots": snapshots,
        "rows in MLflow": rows,
        "metrics per second": rows["metrics"] / (first_s + second_s),
        "report built again, s": report_s,
        "page, bytes": (home / "report/frontier.html").stat().st_size,
    }


def rebuild(home: Path) -> float:
    env = os.environ | {"MOE_FRONTIER_HOME": str(home), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "jobs/report.py", "--name", "many", "--out", f"{home}/report"]
    began = time.monotonic()
    subprocess.run(command, cwd=ROOT, env=env, check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=1000, help="(%(default)s)")
    parser.add_argument("--home", type=Path, help="folder to keep; default: a temporary one")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    home = args.home or Path(tempfile.mkdtemp())
    home.mkdir(parents=True, exist_ok=True)
    found = measure(args.trials, home)
    print(json.dumps(found, indent=1))
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

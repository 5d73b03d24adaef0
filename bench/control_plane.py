"""What a sweep costs beside its training: 1,000 trials of one step each, the driver killed once midway.

  python bench/control_plane.py [--trials 1000] [--home DIR] [--out bench/results/control-plane.json]

Seconds per trial of the whole command, memory of the driver, size of Tune's own snapshots, MLflow's rows, and
how long the report takes to be built again from MLflow alone. A home is a folder to keep.
"""

import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

from bench.harness import ROOT, Record, options

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


def main() -> None:
    args = options(__doc__, trials=1000, home="", out="")
    home = Path(args.home or tempfile.mkdtemp())
    home.mkdir(parents=True, exist_ok=True)
    text = json.dumps(measure(args.trials, home), indent=1)
    print(text)
    if args.out:
        Path(args.out).write_text(text + "\n")


def complete(home: Path) -> int:
    return len(list(home.glob("many/trials/*/result.json")))


def drive(home: Path, most: float) -> tuple[float, dict[int, float], int | None]:
    """Returns the seconds until the driver ends, or until `most` trials are complete and it is killed; the
    most MiB of its memory in every hundred of trials; and its exit code.
    """
    command = ["jobs/pareto_sweep.py", "--sweep", f"{home}/many.py:make", "--confirm", "0"]
    env = os.environ | {"MOE_FRONTIER_HOME": str(home), "PYTHONPATH": str(ROOT), "RAY_ADDRESS": "local"}
    began, mib = time.monotonic(), dict[int, float]()
    with (home / "log.txt").open("ab") as log:
        driver = subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True
        )
    process = psutil.Process(driver.pid)
    while driver.poll() is None and (done := complete(home)) < most:
        with suppress(psutil.Error):
            now = process.memory_info().rss / 2**20
            mib[done // 100 * 100] = max(now, mib.get(done // 100 * 100, 0))
        time.sleep(0.5)
    code = driver.poll()
    driver.kill()
    driver.wait()
    return time.monotonic() - began, mib, code


def measure(trials: int, home: Path) -> Record:
    (home / "many.py").write_text(SWEEP.format(trials=trials))
    first_s, mib, _ = drive(home, trials // 2)
    killed_at = complete(home)
    time.sleep(5)  # its Ray goes with it
    second_s, after, code = drive(home, float("inf"))
    if code:
        sys.exit((home / "log.txt").read_text()[-3000:])
    began = time.monotonic()
    env = os.environ | {"MOE_FRONTIER_HOME": str(home), "PYTHONPATH": str(ROOT)}
    report = [sys.executable, "jobs/report.py", "--name", "many", "--out", f"{home}/report"]
    subprocess.run(report, cwd=ROOT, env=env, check=True, stdout=subprocess.DEVNULL)
    report_s = time.monotonic() - began
    store = sqlite3.connect(home / "mlflow.db")
    rows = {name: store.execute(f"select count(*) from {name}").fetchone()[0] for name in ("runs", "metrics")}
    return {
        "trials": trials,
        "killed at": killed_at,
        "seconds per trial": (first_s + second_s) / trials,
        "seconds per trial, before the kill": first_s / killed_at,
        "seconds per trial, after it": second_s / (trials - killed_at),
        "driver MiB": {str(at): round(size) for at, size in mib.items()},
        "driver MiB at most, after the kill": round(max(after.values())),
        "bytes of Tune's snapshots": sum(p.stat().st_size for p in home.glob("many/tune/*") if p.is_file()),
        "rows in MLflow": rows,
        "metrics per second": rows["metrics"] / (first_s + second_s),
        "report built again, s": report_s,
        "page, bytes": (home / "report/frontier.html").stat().st_size,
    }


if __name__ == "__main__":
    main()

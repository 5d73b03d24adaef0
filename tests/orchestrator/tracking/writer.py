"""A program whose processes are killed: ``python -m tests.orchestrator.tracking.writer URI FOLDER``.

For each line that it reads it forks a process, which spares the imports, and prints its id, "writing" and
"ended". A line is the step to end after; an empty line means never.

As in training, a process continues from a checkpoint that is older than the last report.
"""

import itertools
import os
import sys
import time
from pathlib import Path

from orchestrator.runs.metrics_file import MetricsWriter
from orchestrator.runs.run_directory import SWEEP, acquire_run_dir
from orchestrator.sweeps.sweep import Sweep
from orchestrator.tracking import base
from orchestrator.tracking.base import Following
from orchestrator.tracking.store import open_tracking
from orchestrator.tracking.sync import Sync
from tests.made_directories import DIGEST, begin_sweep, end, run_at

CHECKPOINT_EVERY = 7


def write(uri: str, folder: Path, last: int | None) -> None:
    base.EVERY_S = 0.02  # kills come while it sends
    tracking = open_tracking(uri, artifacts=f"{folder}/artifacts")
    sweep = Sweep(base=run_at(folder, "sweep"), arms={"child": {}})
    directory = folder / "sweep"
    if not (directory / SWEEP).exists():
        begin_sweep(sweep, status="finished")
    run = sweep.runs()["child"]
    with Following(Sync(tracking, str(directory))):
        print("writing", flush=True)
        acquire_run_dir(run, DIGEST)
        checkpoint = folder / "checkpoint"
        start = int(checkpoint.read_text()) if checkpoint.exists() else 0
        writer = MetricsWriter(run)
        writer.resumed(start)
        for step in itertools.count(start + 1):
            writer.report(step, {"number": float(step), "square": float(step**2)})
            if step % CHECKPOINT_EVERY == 0:
                writer.flush()
                checkpoint.with_suffix(".tmp").write_text(str(step))
                checkpoint.with_suffix(".tmp").replace(checkpoint)
            if step == last:
                break
            time.sleep(0.004)
        writer.close()
        Path(directory, "trials", "child", "bad_images.csv").write_text("the end")
        metrics = {"number": float(step + 1), "square": float((step + 1) ** 2), "val__acc1": 0.5}
        end(run, step + 1, **metrics)


if __name__ == "__main__":
    for line in sys.stdin:
        if (pid := os.fork()) == 0:
            write(sys.argv[1], Path(sys.argv[2]), int(line) if line.strip() else None)
            os._exit(0)
        print(pid, flush=True)
        os.waitpid(pid, 0)
        print("ended", flush=True)

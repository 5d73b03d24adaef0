"""A program whose processes are killed: ``python writer.py URI FOLDER``.

For each line that it reads it forks a process, which spares the imports, and prints its id, "writing" and
"ended". A line is the step to end after; an empty one: never.

As training does, a process goes on from a checkpoint that lies behind what was reported.
"""

import itertools
import os
import sys
import tempfile
import time
from pathlib import Path

from orchestrator.config import DataConfig, RunConfig
from orchestrator.tracking import open_tracking, outbox, track, track_training

CHECKPOINT_EVERY = 7
RUN = RunConfig(name="sweep/child", data=DataConfig(path="/data", batch_size=1))


def write(uri: str, folder: Path, last: int | None) -> None:
    outbox.LINGER_S = 0.02  # kills come while it delivers
    with open_tracking(uri, artifacts=f"{folder}/artifacts", spool=f"{folder}/outbox") as tracking:
        print("writing", flush=True)
        parent = track(tracking, str(folder), "sweep", tags={"role": "sweep"})
        child = track_training(tracking, RUN, str(folder / "child"), parent=parent, role="trial")
        checkpoint = folder / "checkpoint"
        start = int(checkpoint.read_text()) if checkpoint.exists() else 0
        for step in itertools.count(start):
            if step % CHECKPOINT_EVERY == 0:
                checkpoint.with_suffix(".tmp").write_text(str(step))
                checkpoint.with_suffix(".tmp").replace(checkpoint)
            child.log(step, {"number": float(step), "square": float(step**2)})
            child.tag(step=str(step))
            if step == last:
                break
            time.sleep(0.004)
        child.write_text("notes/end.txt", "the end")
        child.finish("FINISHED")
        parent.finish("FINISHED")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:  # MLflow imports much when it is first needed
        open_tracking(f"sqlite:///{folder}/x.db", artifacts=folder, spool=f"{folder}/outbox").close(60)
    for line in sys.stdin:
        if (pid := os.fork()) == 0:
            write(sys.argv[1], Path(sys.argv[2]), int(line) if line.strip() else None)
            os._exit(0)
        print(pid, flush=True)
        os.waitpid(pid, 0)
        print("ended", flush=True)

"""Weights & Biases without its server: a file beside each run for ``wandb sync``. Needs pip install wandb."""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import wandb

from orchestrator import Follower, Projection, TrackerConfig


@dataclass(frozen=True, kw_only=True)
class WandbConfig(TrackerConfig):
    """Weights & Biases, offline."""

    kind: Literal["wandb"] = "wandb"

    def follow(self, directory: str) -> Follower:
        return OfflineRuns(directory)


class OfflineRuns(Follower):
    """Writes what a run has, all of it, when it has ended or its command ends. A file that a killed process
    was writing lies elsewhere, so that the run has a whole one or none.
    """

    where = "Weights & Biases"

    def send(self, shown: Projection) -> None:
        if shown.status != "running":
            self.part(shown, "the offline run", self._write, shown)

    def _write(self, shown: Projection) -> None:
        began = time.strftime("%Y%m%d_%H%M%S", time.gmtime(shown.began_s))
        with TemporaryDirectory() as folder:
            run = wandb.init(
                mode="offline",
                dir=folder,
                project=os.environ.get("WANDB_PROJECT", "moe-frontier"),
                id=shown.key,
                name=shown.name,
                group=shown.parent or shown.key,
                job_type=shown.tags.get("role", "trial"),
                notes=shown.note,
                config={**shown.params, **shown.tags},
                reinit="create_new",
                settings=wandb.Settings(
                    console="off", silent=True, disable_git=True, x_disable_stats=True, x_disable_meta=True
                ),
            )
            for scalar in sorted(shown.scalars(), key=lambda each: each.at):  # W&B refuses an earlier step
                run.log({scalar.name: scalar.value, "_timestamp": scalar.time_s}, step=scalar.at)
            run.finish(exit_code=int(shown.status != "finished"))
            wandb.teardown()  # its server has written all of the file only when it has ended
            (file,) = Path(folder).rglob("*.wandb")
            name = f"wandb/offline-run-{began}-{shown.key}/{file.name}"  # where `wandb sync` looks
            self.write_file(shown, name, file.read_bytes())

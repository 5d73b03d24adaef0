"""A small sweep as it lies in a storage and in MLflow, made without Ray, for tests of what follows."""

from pathlib import Path

from orchestrator.checkpoint.weights import export
from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.tracking import Tracking, open_tracking, track, track_training
from orchestrator.training.fit import fit
from orchestrator.training.run_directory import checkpoint_directory, run_directory

ARMS = {
    "dense": {},
    "token": {"model.moe.router.kind": "token_choice", "model.moe.router.k": 2},
    "soft": {"model.moe.router.kind": "soft"},
}
SHORT = {"model.width": 16, "train.steps": 20, "train.lr": 5e-3, "checkpoint.every": 10}


def train_sweep(home: Path, data: str) -> None:
    """The sweep `tiny` of three arms, and an export of each."""
    with open_store(home) as store:
        tags = {"role": "sweep", "objective.quality": "val/acc1", "objective.cost": "cost/train_flops_6mac"}
        parent = track(store, f"{home}/tiny", "tiny", tags=tags)
        for arm, changes in ARMS.items():
            where = {"name": f"tiny/trials/{arm}", "data.path": data, "storage": str(home)}
            run = override(RunConfig(), {**SHORT, **changes, **where})
            tracked = track_training(
                store, run, run_directory(run), parent=parent, role="trial", arm=arm, trial=arm
            )
            tracked.log(20, fit(run, lambda step, metrics: None, inline=True).metrics)
            tracked.finish("FINISHED")
            export(checkpoint_directory(run), f"{home}/{arm}.safetensors")
        parent.finish("FINISHED")


def open_store(home: Path) -> Tracking:
    uri = f"sqlite:///{home}/mlflow.db"
    return open_tracking(uri, artifacts=f"{home}/mlartifacts", spool=f"{home}/outbox/tests")

"""A small sweep as it lies in a storage and in MLflow, made without Ray, for tests of what follows."""

from dataclasses import replace
from pathlib import Path

from orchestrator.checkpoint.export import export
from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.data.manifest import open_manifest
from orchestrator.runs.run_directory import RunDir
from orchestrator.sweeps.publish import publish
from orchestrator.sweeps.sweep import Sweep
from orchestrator.tracking.store import Tracking, open_tracking
from orchestrator.tracking.sync import Sync
from orchestrator.training.fit import fit
from tests.made_directories import begin_sweep, change_record

ARMS = {
    "dense": {},
    "token": {"model.moe.router.kind": "token_choice", "model.moe.router.k": 2},
    "soft": {"model.moe.router.kind": "soft"},
}
SHORT = {"model.width": 16, "train.steps": 20, "train.lr": 5e-3, "checkpoint.every": 10}


def train_sweep(home: Path, data: str) -> None:
    """The sweep `tiny` of three arms, and an export of each."""
    sweep = Sweep(base=override(RunConfig(), {**SHORT, "name": "tiny"}), arms=ARMS)
    for arm, run in train_arms(sweep, home, data).items():
        export(RunDir.of(run).checkpoints, f"{home}/{arm}.safetensors")


def train_arms(sweep: Sweep, home: Path, data: str) -> dict[str, RunConfig]:
    """Trains the arms one after the other in this process, and publishes them; returns their runs."""
    base = override(sweep.base, {"data.path": data, "storage": str(home)})
    sweep = replace(sweep, base=base)
    directory = begin_sweep(sweep, data_digest=open_manifest(data).digest())
    for run in sweep.runs().values():
        fit(run, lambda step, metrics: None)
    change_record(directory, status="finished")
    publish(directory)
    Sync(open_store(home), directory).update()
    return sweep.runs()


def open_store(home: Path) -> Tracking:
    return open_tracking(f"sqlite:///{home}/mlflow.db", artifacts=f"{home}/mlartifacts")

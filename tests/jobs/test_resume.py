"""`kill -9` within a run, and the same command again with other workers: the same samples and losses."""

import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from mlflow import MlflowClient

from orchestrator.runs.metrics_file import read_metrics

STEPS = 75  # of 64 images; an epoch has 22 or 23
COMMON = [
    *("--set", f"train.steps={STEPS}", "--set", "train.report_every=1", "--set", "checkpoint.every=4"),
    *("--set", "data.augment=inception,mixup", "--set", "model.moe.num_experts=4"),
]


def train(home: Path, workers: int, *, kill_at: int | None = None) -> None:
    """To the end, or until it has reported step `kill_at` and is killed, with Ray and all its workers."""
    command = [sys.executable, "jobs/train.py", "--name", "run", "--workers", str(workers), *COMMON]
    environment = {
        **os.environ,
        "MOE_FRONTIER_HOME": str(home),
        "RAY_ADDRESS": "local",
        "RAY_DEDUP_LOGS": "0",
    }
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout
    lines = []
    for line in process.stdout:
        lines.append(line)
        if kill_at is not None and f"step {kill_at}/{STEPS} " in line:
            process.kill()
            break
    code = process.wait()
    assert code == (-9 if kill_at else 0), "".join(lines[-30:])


def history(home: Path) -> dict[str, list[float]]:
    """As the run's directory has it; MLflow has the same steps."""
    client = MlflowClient(f"sqlite:///{home}/mlflow.db")
    (run,) = client.search_runs([e.experiment_id for e in client.search_experiments()], "")
    shown = client.get_metric_history(run.info.run_id, "train/loss")
    rows = read_metrics(f"{home}/run")
    assert (
        sorted(m.step for m in shown) == [row.images for row in rows] == list(range(64, 64 * STEPS + 1, 64))
    )
    names = ("data/fingerprint", "train/loss", "train/grad_norm")
    return {name: [row.metrics[name] for row in rows] for name in names}


def close(a: Sequence[float], b: Sequence[float]) -> bool:
    return list(a) == pytest.approx(list(b), rel=1e-4)


@pytest.mark.slow  # five starts of Ray Train
def test_killed_and_continued_on_other_workers(tmp_path: Path) -> None:
    """2 -> 1 -> 2 workers, by Ray Data, in process, by Ray Data; over three ends of epochs."""
    train(tmp_path / "undisturbed", 2)
    whole = history(tmp_path / "undisturbed")
    first, second = random.randint(10, 30), random.randint(40, 60)
    train(tmp_path / "killed", 2, kill_at=first)
    train(tmp_path / "killed", 1, kill_at=second)
    train(tmp_path / "killed", 2)
    killed = history(tmp_path / "killed")
    assert killed["data/fingerprint"] == whole["data/fingerprint"], (first, second)
    for name in ("train/loss", "train/grad_norm"):
        # the kill may come between the line that it waits for and MLflow
        assert killed[name][: first - 1] == whole[name][: first - 1], "to the bit at the same layout"
        assert close(killed[name], whole[name]), (first, second)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_killed_and_continued_as_before(workers: int, tmp_path: Path) -> None:
    """Equal to the bit."""
    train(tmp_path / "undisturbed", workers)
    train(tmp_path / "killed", workers, kill_at=random.randint(10, 60))
    train(tmp_path / "killed", workers)
    assert history(tmp_path / "killed") == history(tmp_path / "undisturbed")

"""A wish: a task that distils another model, in one file of a user's own."""

from collections.abc import Callable
from pathlib import Path

import pytest

from jobs import train
from orchestrator.runs.metrics_file import read_metrics
from orchestrator.runs.run_directory import RunDir

DISTIL = """
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
import torch.nn.functional as F

from orchestrator import ClassificationConfig, load_model, normalize


@lru_cache(2)
def teacher_of(reference):
    return load_model(reference)


@dataclass(frozen=True, kw_only=True)
class DistilConfig(ClassificationConfig):
    kind: Literal["distil"] = "distil"
    teacher: str = ""
    weight: float = 0.5

    def loss_share(self, heads, batch, batch_size):
        share, metrics = super().loss_share(heads, batch, batch_size)
        with torch.no_grad():
            soft = teacher_of(self.teacher)(normalize(batch["image"])).logits.softmax(-1)
        pull = F.cross_entropy(heads["logits"], soft, reduction="none").sum() / batch_size
        total = (1 - self.weight) * share + self.weight * pull
        return total, metrics | {"train/loss_teacher": pull.detach()}
"""


def test_a_task_that_distils(
    empty_home: Path, digits: str, call: Callable[..., tuple[str, str]], tmp_path: Path
):
    plugin = tmp_path / "distil_wish.py"
    plugin.write_text(DISTIL)
    words = ["--data", digits, "--set", "train.steps=6", "train.report_every=3", "data.batch_size=16"]
    assert call(train.main, "--name", "teacher", *words)[0] == ""
    task = ["task.kind=distil", f"task.teacher={empty_home}/teacher"]
    stopped, said = call(train.main, "--plugin", str(plugin), "--name", "student", *words, *task)
    assert stopped == "", said
    rows = read_metrics(RunDir(f"{empty_home}/student").path)
    pulls = [row.metrics["train/loss_teacher"] for row in rows if "train/loss_teacher" in row.metrics]
    assert pulls
    assert pulls[0] == pytest.approx(2.3, abs=0.2)

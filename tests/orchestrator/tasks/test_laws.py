"""Laws over all tasks: a step does not depend on workers and microbatches. ``--plugin FILE`` adds a task."""

from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator.data.batch import Batch
from orchestrator.tasks import TaskConfig
from orchestrator.training.loop import evaluate, train_step
from tests.orchestrator.as_one import Case, check_ranks_train_as_one
from tests.orchestrator.training.test_loop import ROUTERS, live_model, random_batch, small_run

BATCH = 8
LIVELY = {"train.lr": 0.01, "train.schedule.warmup_steps": 0}
# router -> how it is spread over two workers
LAYOUTS: dict[str, dict[str, Any]] = {"soft": {"train.microbatch": 2}, "token_choice": {"scale.ep": 2}}
# Tasks of other heads have laws of their own: `test_contrastive`.
KINDS = sorted(kind for kind, cls in TaskConfig.kinds.items() if cls.needs == ("logits",))
EVERY_TASK = pytest.mark.parametrize("task", KINDS)


@EVERY_TASK
@pytest.mark.parametrize("router", ROUTERS)
def test_microbatches_have_the_gradients_of_the_whole(router: str, task: str) -> None:
    grown: list[dict[str, torch.Tensor]] = []
    for microbatch in (None, 4, 2):
        changes = {"task.kind": task, "train.microbatch": microbatch, "train.clip_norm": None}
        run = small_run(router, **changes)
        model = live_model(run, torch.float64)
        train_step(model, run.train.optimizer.build(model), random_batch(BATCH), run, step=0)
        grown.append({name: param.grad for name, param in model.named_parameters()})
    for other in grown[1:]:
        for name, expected in grown[0].items():
            torch.testing.assert_close(other[name], expected, rtol=1e-12, atol=1e-14)


@EVERY_TASK
def test_two_workers_train_as_one(task: str, tmp_path: Path) -> None:
    cases = {}
    for router, layout in LAYOUTS.items():
        run = small_run(router, **{"task.kind": task}, **LIVELY)
        compared = {"train/loss": 1e-6, "train/grad_norm": 2e-6, run.task.quality: 1e-6}
        cases[router] = Case(run=run, layouts=[layout], batch=batch_of, compared=compared)
    check_ranks_train_as_one(cases, tmp_path)


def batch_of(step: int, valid: int) -> Batch:
    return random_batch(BATCH, step, valid=valid)


@EVERY_TASK
def test_what_a_task_reports_is_described(task: str) -> None:
    run = small_run(**{"task.kind": task})
    model, batch = live_model(run), random_batch(BATCH)
    reported = train_step(model, run.train.optimizer.build(model), batch, run, step=0)
    own = {*reported} - {"train/loss", "train/loss_router", "train/grad_norm", "train/lr"}
    measured = {name for name in evaluate(model, [batch], run) if name.startswith("val/")}
    assert own | measured <= {*run.task.described}
    assert run.task.quality in measured
    assert 0 <= run.task.chance(run.model) < 1

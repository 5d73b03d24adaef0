"""Laws over all tasks: a step does not depend on workers and microbatches. ``--plugin FILE`` adds a task."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator.codec import flat, override, read_config, to_dict
from orchestrator.config import RunConfig
from orchestrator.data.batch import Batch
from orchestrator.tasks import TaskConfig
from orchestrator.training.loop import _sum_over_workers, evaluate, train_step
from orchestrator.training.metrics_file import Metrics
from orchestrator.training.worker import build_model
from tests.moe.parity import share, spawn
from tests.orchestrator.training.test_loop import ROUTERS, live_model, random_batch, small_run

STEPS, BATCH = 3, 8
LIVELY = {"train.lr": 0.01, "train.schedule.warmup_steps": 0}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp=2": {"scale.workers": 2},
    "dp=2, microbatches": {"scale.workers": 2, "train.microbatch": 2},
    "ep=2": {"scale.workers": 2, "scale.ep": 2},
    "ep=2, microbatches": {"scale.workers": 2, "scale.ep": 2, "train.microbatch": 2},
}
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
    runs: dict[str, tuple[RunConfig, list[Metrics]]] = {}
    for router in ("soft", "token_choice"):
        run = small_run(router, **{"task.kind": task}, **LIVELY)
        alone = trained(run)
        runs |= {f"{router}, {name}": (override(run, layout), alone) for name, layout in LAYOUTS.items()}
    # Pickled runs bring a plugin along.
    (tmp_path / "runs").write_bytes(pickle.dumps(runs))
    spawn(2, check, str(tmp_path))


def check(rank: int, ranks: int, folder: str) -> None:
    for name, (run, expected) in pickle.loads(Path(folder, "runs").read_bytes()).items():
        for step, (ours, theirs) in enumerate(zip(trained(run, rank, ranks), expected, strict=True)):
            for metric in ours.keys() & {"train/loss", "train/grad_norm", run.task.quality}:
                error = abs(ours[metric] - theirs[metric])
                tolerance = 2e-6 if metric == "train/grad_norm" else 1e-6
                assert error <= tolerance * abs(theirs[metric]), (name, step, metric, error)


def trained(run: RunConfig, rank: int = 0, workers: int = 1) -> list[Metrics]:
    """Metrics of every step, and of an evaluation whose last images are padding."""
    mine = share(rank, workers, BATCH)
    model = build_model(run, torch.device("cpu"), seed=1)
    optimizer = run.train.optimizer.build(model)

    def part(seed: int, valid: int = BATCH) -> Batch:
        return random_batch(BATCH, seed, valid=valid).map(lambda field: field[mine])

    found = [
        _sum_over_workers(train_step(model, optimizer, part(step), run, step=step)) for step in range(STEPS)
    ]
    values = evaluate(model, [part(step, valid=6) for step in range(STEPS)], run)
    return [*found, {run.task.quality: values[run.task.quality]}]


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


def test_a_config_of_before_has_its_loss_in_the_task() -> None:
    tree = to_dict(RunConfig())
    del tree["task"]
    tree["train"]["loss"] = "sigmoid"
    run = read_config(RunConfig, tree)
    assert flat(run)["task.loss"] == "sigmoid"
    assert override(RunConfig(), {"train.loss": "sigmoid"}) == run


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

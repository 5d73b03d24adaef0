"""Runs that the ranks of one gloo group train as a single process does: tasks, recipes, optimisers."""

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moe.parallel import sum_over_ranks
from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.data.batch import Batch
from orchestrator.data.stream import in_process
from orchestrator.runs.metrics_file import Metrics
from orchestrator.training.loop import evaluate, train_step
from orchestrator.training.worker import build_model, train_worker
from tests.moe.parity import default_dtype, share, spawn


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained, and compared.

    Attributes:
        layouts: changes of the run, each of which spreads it over the ranks in another way.
        batch: ``batch(step, valid)``: the whole batch of a step, of which so many images are no padding.
        compared: metric of a step or of the evaluation after it -> its largest relative error.
        padded: valid images in a batch of the evaluation; 0: there is none.
    """

    run: RunConfig
    layouts: Sequence[Mapping[str, Any]]
    batch: Callable[[int, int], Batch]
    compared: Mapping[str, float]
    padded: int = 6
    steps: int = 3
    dtype: torch.dtype = torch.float32


def check_ranks_train_as_one(
    cases: Mapping[str, Case], folder: Path, ranks: int = 2
) -> dict[str, list[Metrics]]:
    """Returns what a single process finds: the metrics of every step of a case, and of its evaluation."""
    alone = {name: _trained(case, case.run) for name, case in cases.items()}
    # Pickled runs bring a plugin along.
    (folder / "cases").write_bytes(pickle.dumps((dict(cases), alone)))
    spawn(ranks, _compare, str(folder))
    return alone


def train_on_ranks(run: RunConfig, folder: Path, until: int | None = None) -> dict[int, Metrics]:
    """Trains a run on all its workers, from its own data, and returns the reports of the first."""
    (folder / "run").write_bytes(pickle.dumps((run, until)))
    spawn(run.scale.workers, _train, str(folder))
    return pickle.loads((folder / "reports").read_bytes())


def _train(rank: int, ranks: int, folder: str) -> None:
    (run, until), reports = pickle.loads(Path(folder, "run").read_bytes()), dict[int, Metrics]()
    train_worker(run, report=lambda step, m: reports.update({step: m}), read=in_process, until=until)
    if rank == 0:
        Path(folder, "reports").write_bytes(pickle.dumps(reports))


def _compare(rank: int, ranks: int, folder: str) -> None:
    cases, alone = pickle.loads(Path(folder, "cases").read_bytes())
    for name, case in cases.items():
        for layout in case.layouts:
            together = _trained(case, override(case.run, {"scale.workers": ranks, **layout}), rank, ranks)
            for step, (got, expected) in enumerate(zip(together, alone[name], strict=True)):
                for metric in case.compared.keys() & expected.keys():
                    error = abs(got[metric] - expected[metric])
                    what = f"{name}, {layout}, step {step}, {metric}: {got[metric]}, not {expected[metric]}"
                    assert error <= case.compared[metric] * abs(expected[metric]), what
        assert case.compared.keys() <= {metric for step in alone[name] for metric in step}, name


def _trained(case: Case, run: RunConfig, rank: int = 0, ranks: int = 1) -> list[Metrics]:
    size = run.data.batch_size
    mine = share(rank, ranks, size)

    def part(step: int, valid: int) -> Batch:
        return case.batch(step, valid).map(lambda field: field[mine])

    with default_dtype(case.dtype):
        model = build_model(run, torch.device("cpu"), seed=1)
        model.register_forward_pre_hook(lambda _, inputs: tuple(_to(case.dtype, each) for each in inputs))
        optimizer, found = run.train.optimizer.build(model), list[Metrics]()
        for step in range(case.steps):
            metrics = train_step(model, optimizer, part(step, size), run, step=step)
            sums = sum_over_ranks(torch.stack([value.double() for value in metrics.values()]))
            found.append(dict(zip(metrics, sums.tolist(), strict=True)))
        if case.padded:
            found.append(evaluate(model, [part(step, case.padded) for step in range(case.steps)], run))
        return found


def _to(dtype: torch.dtype, images: Any) -> Any:
    return images.to(dtype) if isinstance(images, torch.Tensor) and images.is_floating_point() else images

"""A run that is cut anywhere, any number of times, is the undisturbed run: its reports, its checkpoints to
the bit, its end. Of all routers, above all those that count; on one worker and two.
"""

import math
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from moe.config import members
from moe.routing import RouterConfig
from orchestrator.checkpoint import manifest as manifests
from orchestrator.checkpoint.models import read_model
from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.data.stream import in_process
from orchestrator.runs.metrics_file import Metrics, read_metrics
from orchestrator.runs.run_directory import RunDir
from orchestrator.training.worker import train_worker
from tests.lanes import mostly_slow
from tests.moe.parity import spawn
from tests.orchestrator.training.recipe import RECIPE

STEPS = 11  # no multiple of any interval below
SMALL = {
    "data.batch_size": 8,
    "model.width": 16,
    "model.mlp_dim": 32,
    "model.depth": 2,
    "model.moe.num_experts": 4,
    "train.steps": STEPS,
    "train.lr": 1e-2,
    "train.report_every": 3,
    "train.eval_every": 5,
    "checkpoint.every": 4,
    "checkpoint.keep_every": 8,
    "checkpoint.asynchronous": False,  # a crash in a test kills no thread that still writes
}
ROUTER = "model.moe.router."
COUNTING = {
    "sign": {"balance.kind": "sign"},
    "quantile": {"balance.kind": "quantile", "balance.ema": 0.5},
    "shares": {"balance_weight": 0.1, "balance_level": "batch"},
    "sign and shares": {"balance.kind": "sign", "balance_weight": 0.1, "balance_level": "batch"},
}
CASES = {
    **{member.kind: {f"{ROUTER}kind": member.kind} for member in members(RouterConfig)},
    **{
        name: {f"{ROUTER}kind": "top_k", f"{ROUTER}k": 2, **{ROUTER + n: v for n, v in changes.items()}}
        for name, changes in COUNTING.items()
    },
    "recipe, best three": RECIPE | {"checkpoint.keep_best": 3, "data.batch_size": 16, "data.lanes": 4},
    "loss diverges": {
        "train.optimizer.kind": "sgd",
        "train.lr": 1e18,
        "train.clip_norm": None,
        "train.schedule.warmup_steps": 0,
    },
    # The first update overflows them; its own loss is finite.
    "weights overflow": {"train.lr": 1e39, "train.schedule.warmup_steps": 0},
    "keeps others than it saves": {"checkpoint.keep_every": 5, "train.eval_every": 7},
    "stops early": {
        "train.steps": 17,
        "train.stop_at": 0.23,
        "train.lr": 0.02,
        "train.schedule.warmup_steps": 0,
        "data.batch_size": 64,
    },
}
DIVERGING = ("loss diverges", "weights overflow")
FAST = ("sign and shares", "weights overflow", "stops early")
SLOW = ("top_k", "sign", "shares")  # "sign and shares" has all of their state
COUNTS = [name for name in CASES if name in (*COUNTING, "relu")]
TIMES = ("perf/", "data/wait_frac", "cost/device_s", "checkpoint/age_s", "resumed/")


def in_lanes(cases: Iterable[str]) -> list[Any]:
    return [
        case
        if case in FAST
        else pytest.param(case, marks=pytest.mark.slow if case in SLOW else pytest.mark.smoke)
        for case in cases
    ]


class KilledError(Exception):
    pass


def train(run: RunConfig, cuts: random.Random | None) -> None:
    """Trains to the end; with `cuts` it pauses, is asked to stop and is killed, each at a random step, which
    all workers draw."""
    for kind in cuts.sample(("pause", "stop", "kill"), 3) if cuts else ():
        at, calls = cuts.randint(1, run.train.steps) if cuts else 0, count(1)

        def report(step: int, metrics: Metrics, *, kind: str = kind, at: int = at) -> None:
            if kind == "kill" and step >= at:
                raise KilledError

        def stops(*, kind: str = kind, calls: Iterator[int] = calls, at: int = at) -> bool:
            return next(calls) == at and kind == "stop"

        with suppress(KilledError):
            until = at if kind == "pause" else None
            train_worker(run, report=report, read=in_process, until=until, should_stop=stops)
        if dist.is_initialized():
            dist.barrier()
        if RunDir.of(run).result():
            return
    train_worker(run, report=lambda step, metrics: None, read=in_process)


def record_of(run: RunConfig) -> dict[str, Any]:
    """Returns the reports of a run by step, the digests of its checkpoints' files, and its result, without
    times."""
    own = RunDir.of(run)
    result = own.result()
    assert result is not None

    def counted(metrics: Metrics) -> Metrics:
        return {name: value for name, value in metrics.items() if not name.startswith(TIMES)}

    folders = {s: manifests.folder_of(own.checkpoints, s) for s in manifests.steps(own.checkpoints)}
    kept = {step: manifests.verify_checkpoint(folder) for step, folder in folders.items()}
    return {
        "reports": {row.step: counted(row.metrics) for row in read_metrics(own.path)},
        "checkpoints": {s: sorted(file.sha256 for file in m.files.values()) for s, m in kept.items()},
        "qualities": {step: manifest.quality() for step, manifest in kept.items()},
        "end": (result.status, result.step, result.checkpoint, result.weights, counted(result.metrics)),
        "best": (result.best_checkpoint, result.best_quality),
    }


def check_best(record: dict[str, Any], run: RunConfig) -> None:
    """The best evaluations are kept, and the result names the first of them."""
    quality = run.task.quality
    evaluated = [
        (-metrics[quality], step) for step, metrics in record["reports"].items() if quality in metrics
    ]
    best = sorted(evaluated)[: run.checkpoint.keep_best]
    assert {step for _, step in best} <= record["checkpoints"].keys()
    assert record["best"] == (f"checkpoints/step-{best[0][1]:08d}", -best[0][0])


def small_run(few_digits: str, folder: Path | str, case: str, **changes: Any) -> RunConfig:
    changes = SMALL | {"data.path": few_digits, "storage": str(folder)} | CASES[case] | changes
    return override(RunConfig(), changes)


@pytest.fixture(scope="module")
def whole(few_digits: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], RunConfig]:
    """Trains a case once, undisturbed."""
    folder = tmp_path_factory.mktemp("whole")

    @cache
    def trained(case: str) -> RunConfig:
        run = small_run(few_digits, folder, case, name=case.replace(" ", "-").replace(",", ""))
        train(run, None)
        record = record_of(run)
        assert record["end"][0] == ("diverged" if case in DIVERGING else "finished")
        assert (record["end"][1] < run.train.steps) == (case in ("stops early", *DIVERGING))
        if case not in DIVERGING:
            check_best(record, run)
        return run

    return trained


@pytest.mark.parametrize("seed", mostly_slow([0, 1, 2, 3, 4], fast=[0]))
@pytest.mark.parametrize("case", in_lanes(CASES))
def test_a_run_cut_anywhere_is_the_undisturbed_run(
    case: str, seed: int, whole: Callable[[str], RunConfig]
) -> None:
    run = whole(case)
    cut = override(run, {"name": f"{case} cut {seed}".replace(" ", "-").replace(",", "")})
    train(cut, random.Random(f"{case} {seed}"))
    assert record_of(cut) == record_of(run)


@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("pauses", [True, False], ids=["paused", "stopped"])
@pytest.mark.parametrize("case", DIVERGING)
def test_a_run_that_diverges_where_it_is_cut(
    case: str, pauses: bool, at: int, whole: Callable[[str], RunConfig], tmp_path: Path
) -> None:
    """It ends where the undisturbed run looks: at its first report. A state that is finite is saved first."""
    run, calls = whole(case), count(1)
    cut = override(run, {"storage": str(tmp_path)})
    train_worker(
        cut,
        report=lambda step, metrics: None,
        read=in_process,
        until=at if pauses else None,
        should_stop=lambda: not pauses and next(calls) == at,
    )
    train(cut, None)
    ends = [record_of(each)["end"] for each in (cut, run)]
    assert [end[:2] for end in ends] == [("diverged", 3)] * 2
    assert record_of(cut)["reports"].keys() == {3}


@pytest.mark.parametrize("case", in_lanes(COUNTS))
def test_a_branch_is_its_trunk(case: str, whole: Callable[[str], RunConfig]) -> None:
    """With the same steps and rates; and a model that is loaded from it begins with counts of 0."""
    trunk = whole(case)
    at = manifests.folder_of(RunDir.of(trunk).checkpoints, 8)
    branch = override(trunk, {"name": f"{trunk.name}-branch", "train.trunk": at})
    train(branch, None)
    last = [record_of(run)["checkpoints"][STEPS] for run in (trunk, branch)]
    assert last[0] == last[1]
    model = read_model(RunDir.of(trunk).checkpoints).load()
    counts = [buffer for name, buffer in model.named_buffers() if name.endswith("counts")]
    assert counts
    assert not any(buffer.any() for buffer in counts)


def two_workers(rank: int, ranks: int, folder: str) -> None:
    few_digits, *cases = Path(folder, "cases").read_text().splitlines()
    for case in cases:
        layout = {"scale.workers": ranks, "scale.ep": ranks}
        run = small_run(few_digits, folder, case, name=f"{case} whole".replace(" ", "-"), **layout)
        cut = override(run, {"name": f"{case} cut".replace(" ", "-")})
        train(run, None)
        train(cut, random.Random(case))
        dist.barrier()
        assert record_of(cut) == record_of(run), case


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(("sign and shares", "relu"), marks=pytest.mark.smoke),
        pytest.param(("quantile",), marks=pytest.mark.slow),  # counts too
    ],
    ids=", ".join,
)
def test_two_workers(cases: tuple[str, ...], few_digits: str, tmp_path: Path) -> None:
    (tmp_path / "cases").write_text("\n".join((few_digits, *cases)))
    spawn(2, two_workers, str(tmp_path))


@pytest.mark.parametrize("keep_best", [1, 3])
@pytest.mark.parametrize(
    ("evaluates", "saves"), mostly_slow([(2, 7), (3, 5), (7, 2), (10, 100), (100, 3)], fast=[(3, 5)])
)
def test_the_best_is_kept_at_any_intervals(
    evaluates: int, saves: int, keep_best: int, few_digits: str, tmp_path: Path
) -> None:
    """The rate is so high that the model gets worse in the middle of the run."""
    changes = {"train.eval_every": evaluates, "checkpoint.every": saves, "checkpoint.keep_best": keep_best}
    run = small_run(few_digits, tmp_path, "soft", **changes, **{"train.lr": 0.3, "train.steps": 17})
    train(run, random.Random(evaluates))
    record = record_of(run)
    check_best(record, run)
    assert math.isfinite(record["best"][1])

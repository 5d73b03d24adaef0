"""Trials of 1, 2 and 4 workers share four CPUs: none waits for ever, none is started into nothing."""

from pathlib import Path

import pytest

from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.sweeps.budget import Budget, BudgetTracker
from orchestrator.sweeps.check import check_fits, claim_sweep
from orchestrator.sweeps.log import TrialLog
from orchestrator.sweeps.run import Options, SweepRun
from orchestrator.sweeps.sweep import Sweep
from orchestrator.tracking import open_tracking, track
from orchestrator.training.worker import Result, run_directory
from tests.orchestrator.sweeps.watch import Unwatched
from tests.parts import start_ray

pytestmark = pytest.mark.slow  # workers of their own for every large trial


@pytest.fixture
def four_cpus(no_cluster: None) -> None:
    start_ray(num_cpus=4)


def swept(digits: str, folder: Path, workers: list[int]) -> dict[str, object]:
    changes = {"name": "mixed", "data.path": digits, "storage": str(folder / "home"), "train.steps": 4}
    base = override(RunConfig(), changes | {"model.moe.num_experts": 4})
    arms = {f"w{n}-{i}": {"scale.workers": n, "scale.ep": min(n, 2)} for i, n in enumerate(workers)}
    sweep = Sweep(base=base, arms=arms)
    check_fits(sweep)
    claim_sweep(sweep, "auto")
    uri = f"sqlite:///{folder}/mlflow.db"
    with open_tracking(uri, artifacts=str(folder / "files"), spool=str(folder / "spool")) as store:
        parent = track(store, run_directory(base), "mixed", tags={"role": "sweep"})
        budget = BudgetTracker(Budget(), run_directory(base))
        run = SweepRun(sweep, TrialLog(sweep, store, parent), budget, Options())
        run.work(Unwatched())
        return dict(run.outcomes())


@pytest.mark.usefixtures("four_cpus")
def test_mixed_trials_all_end(digits, tmp_path):
    outcomes = swept(digits, tmp_path, [1, 4, 2, 1, 2, 1])
    assert len(outcomes) == 6
    assert all(isinstance(o, Result) and o.status == "finished" for o in outcomes.values()), outcomes

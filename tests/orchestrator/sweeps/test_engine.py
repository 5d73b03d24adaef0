"""What the driver is told of Tune's trials, and real trials whose processes do not do as Tune expects."""

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from ray.cluster_utils import Cluster
from ray.tune.execution.class_cache import _ActorClassCache
from ray.util.placement_group import remove_placement_group

from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.runs.run_directory import Result
from orchestrator.sweeps.budget import Budget, BudgetTracker
from orchestrator.sweeps.driver import run_sweep
from orchestrator.sweeps.engine import NewTrials, _reserved
from orchestrator.sweeps.queue import Outcome, RunToCompletion, TrialQueue, new_trial_state
from orchestrator.sweeps.run import SweepRun, Watch
from orchestrator.sweeps.scheduler import FrontierScheduler
from orchestrator.sweeps.sweep import Sweep, Trial
from orchestrator.training.resources import run_resources
from tests.made_directories import begin_sweep
from tests.parts import start_ray


def suggested(**changes: Any) -> tuple[FrontierScheduler, dict[str, Any], list[Outcome]]:
    """The config of a trial that the queue hands to Tune, and how its jobs have ended."""
    run = override(RunConfig(), {"model.moe": None} | changes)
    need = run_resources(run)
    state = new_trial_state(Trial(name="a", arm="a", changes={}, run=run), cost=1.0, need=need)
    ends: list[Outcome] = []
    fixed: dict[str, Any] = {"cluster_resources": lambda: need, "quality": "val/acc1"}
    queue = TrialQueue([state], RunToCompletion(), ended=lambda job, outcome: ends.append(outcome), **fixed)
    scheduler = FrontierScheduler.of_queue(queue)
    return scheduler, NewTrials(scheduler).suggest("tune-1"), ends


@pytest.fixture
def tuned() -> tuple[FrontierScheduler, Any, list[Outcome]]:
    """A trial that was handed to Tune, which will never start a process for it."""
    scheduler, config, ends = suggested()
    died = {
        "get_error": lambda: RuntimeError("no environment"),
        "run_metadata": SimpleNamespace(num_failures=1),
    }
    trial = SimpleNamespace(trial_id="tune-1", config=config, status="PENDING", **died)
    scheduler.on_trial_add(None, trial)  # pyright: ignore[reportArgumentType]
    return scheduler, trial, ends


def choose(scheduler: FrontierScheduler) -> None:
    searcher = SimpleNamespace(is_finished=lambda: False)
    assert scheduler.choose_trial_to_run(SimpleNamespace(search_alg=searcher)) is None


def test_a_job_whose_process_never_ran_ends_once(tuned):
    """Tune reports an error without a start where Ray could make no process, and then sets the status."""
    scheduler, trial, ends = tuned
    scheduler.on_trial_error(None, trial)
    trial.status = "ERROR"
    choose(scheduler)
    assert ends == ["its process died 1 times: no environment"]


def test_a_trial_that_tune_gave_up_without_a_word_ends(tuned):
    scheduler, trial, ends = tuned
    choose(scheduler)
    assert not ends
    trial.status = "ERROR"
    choose(scheduler)
    assert ends == ["its process could not be reused: no environment"]
    assert not scheduler.queue.num_running


@pytest.mark.parametrize(
    ("changes", "reserved"),
    [
        ({}, {"CPU": 1}),
        ({"scale.workers": 2}, {"memory": 1 << 20}),
        ({"scale.use_gpu": True}, {"memory": 1 << 20}),
        ({"scale.use_gpu": True, "scale.workers": 2}, {"memory": 1 << 20}),
    ],
)
def test_a_trials_process_reserves_no_device_of_its_workers(changes, reserved):
    """Its workers would wait for ever for a GPU that the process which started them holds."""
    _, config, _ = suggested(**changes)
    assert _reserved(config).bundles == [reserved]


@pytest.mark.slow
@pytest.mark.usefixtures("no_cluster")
def test_resources_that_are_given_back_at_once_are_not_lost() -> None:
    """Ray would lose those of one group in a few hundred: the one it was placing when it was removed."""
    start_ray()
    _, config, _ = suggested()
    for _ in range(1000):
        remove_placement_group(_reserved(config).to_placement_group())
    for _ in range(100):
        if ray.available_resources().get("CPU") == 2:
            return
        time.sleep(0.1)
    pytest.fail(f"still taken: all but {ray.available_resources().get('CPU', 0)} of 2 CPUs")


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_sweep_ends_though_processes_cannot_be_reused(
    digits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tune gives the thread of the trial before no time to end, as on a machine that is too busy."""
    patience = {"env_vars": {"TUNE_FUNCTION_THREAD_TIMEOUT_S": "0"}}
    impatient = ray.remote(runtime_env=patience)
    monkeypatch.setattr(_ActorClassCache, "get", lambda _, trainable: impatient(trainable))
    changes = {"name": "tiny", "data.path": digits, "storage": str(tmp_path), "train.steps": 2}
    base = override(RunConfig(), changes | {"model.moe": None})
    sweep = Sweep(base=base, arms={f"lr{n}": {"train.lr": n} for n in (0.1, 0.2, 0.3)})
    begin_sweep(sweep)
    run = SweepRun(sweep, BudgetTracker(Budget(), str(tmp_path)), RunToCompletion(), max_concurrent=1)
    run.work()
    outcomes = run.outcomes()
    assert list(outcomes) == [*sweep.arms]
    assert isinstance(outcomes["lr0.1"], Result)
    assert all("could not be reused" in reason for reason in run.failures().values())


@pytest.mark.slow  # workers of their own for every large trial
@pytest.mark.usefixtures("no_cluster")
def test_trials_of_several_sizes_all_end(digits: str, tmp_path: Path) -> None:
    """They share four CPUs: none waits for ever, none is started into nothing."""
    start_ray(num_cpus=4)
    changes = {"name": "mixed", "data.path": digits, "storage": str(tmp_path), "train.steps": 4}
    base = override(RunConfig(), changes | {"model.moe.num_experts": 4})
    workers = [1, 4, 2, 1, 2, 1]
    arms = {f"w{n}-{i}": {"scale.workers": n, "scale.ep": min(n, 2)} for i, n in enumerate(workers)}
    frontier = run_sweep(Sweep(base=base, arms=arms))
    assert {p.arm: p.status for p in frontier.points} == dict.fromkeys(arms, "finished")


@pytest.mark.slow  # a cluster of three nodes
@pytest.mark.usefixtures("no_cluster")
def test_halves_of_cpus_on_two_nodes_read_images(digits: str, tmp_path: Path) -> None:
    """The trials fit four CPUs: one each, and 0.5 + 0.5 + 1 for two workers and their images. They leave half
    a CPU on each node.
    """
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=2)
        ray.init(cluster.address, logging_level="error", log_to_driver=False)
        changes = {"name": "halves", "data.path": digits, "storage": str(tmp_path), "train.steps": 4000}
        base = override(RunConfig(), changes | {"model.moe.num_experts": 4, "checkpoint.every": 10})
        arms: dict[str, Any] = {f"one-{dim}": {"model.mlp_dim": dim} for dim in (32, 64)}
        arms["two"] = {"scale.workers": 2, "scale.ep": 2, "train.steps": 20}
        sweep = Sweep(base=base, arms=arms)
        begin_sweep(sweep)
        ended: list[str] = []

        class Watching(Watch):
            def ended(self, name: str, outcome: Outcome) -> None:
                ended.append(name)
                os.kill(os.getpid(), signal.SIGINT)

        with pytest.raises(KeyboardInterrupt):
            SweepRun(
                sweep, BudgetTracker(Budget(), str(tmp_path)), RunToCompletion(), watch=Watching()
            ).work()
        assert ended == ["two"]
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.mark.slow  # four attempts
@pytest.mark.usefixtures("no_cluster")
def test_a_trial_with_a_gpu_gets_it_for_its_worker(digits: str, tmp_path: Path) -> None:
    """Ray counts one GPU. Where there is none, each attempt fails in its worker and frees what it held."""
    ray.init("local", num_cpus=2, num_gpus=1, logging_level="error", log_to_driver=False)
    changes = {"name": "gpu", "data.path": digits, "storage": str(tmp_path), "train.steps": 2}
    base = override(RunConfig(), changes | {"model.moe": None, "scale.use_gpu": True})
    tracker = BudgetTracker(Budget(), str(tmp_path))
    sweep = Sweep(base=base, arms={"a": {}})
    begin_sweep(sweep)
    run = SweepRun(sweep, tracker, RunToCompletion())
    run.work()
    outcome = run.outcomes()["a"]
    assert isinstance(outcome, Result) if torch.cuda.is_available() else "no GPUs found" in str(outcome)
    assert ray.available_resources()["GPU"] == 1

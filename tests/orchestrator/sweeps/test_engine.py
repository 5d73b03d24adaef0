"""What the driver is told of Tune's trials."""

from types import SimpleNamespace
from typing import Any

from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.sweeps.engine import Follow, Hooks, NewTrials, SweepScheduler
from orchestrator.sweeps.queue import RunToCompletion, TrialQueue, state_of
from orchestrator.sweeps.sweep import Trial


def test_a_job_whose_process_never_ran_begins_before_it_ends():
    """Tune reports an error without a start where Ray could make no process: what a job holds is counted from
    its start.
    """
    run = override(RunConfig(), {"model.moe": None})
    state = state_of(Trial(name="a", arm="a", changes={}, run=run), cost=1.0, need={"CPU": 1})
    queue = TrialQueue([state], RunToCompletion(), cluster_resources={"CPU": 1}, quality="val/acc1")
    heard: list[tuple[str, ...]] = []
    hooks = Hooks(
        began=lambda job: heard.append(("began", job.trial.name)),
        report=lambda *report: None,
        done=lambda job, outcome: heard.append(("done", job.trial.name, str(outcome))),
        status=lambda: None,
    )
    scheduler = SweepScheduler(queue, hooks)
    first = scheduler.new_job()
    assert first
    config = NewTrials(scheduler, first).suggest("tune-1")
    error = RuntimeError("no environment")
    tuned: Any = SimpleNamespace(trial_id="tune-1", config=config, get_error=lambda: error)
    Follow(scheduler).on_trial_error(0, [], tuned)
    assert heard == [("began", "a"), ("done", "a", "its process died 4 times: no environment")]

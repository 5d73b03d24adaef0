"""What the driver hears of Tune's trials."""

from types import SimpleNamespace

from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.sweeps.agenda import Agenda, Standing, ToTheEnd
from orchestrator.sweeps.engine import Hooks, _Follow, _Jobs
from orchestrator.sweeps.sweep import Trial


def test_a_job_whose_process_never_ran_begins_before_it_ends():
    """Tune reports an error without a start where Ray could make no process: what a job holds is counted from
    its start.
    """
    run = override(RunConfig(), {"model.moe": None})
    one = Standing(Trial(name="a", arm="a", changes={}, run=run), cost=1.0, need={"CPU": 1})
    jobs = _Jobs(Agenda([one], ToTheEnd(), most={"CPU": 1}, quality="val/acc1"))
    heard: list[tuple[str, ...]] = []
    hooks = Hooks(
        began=lambda job: heard.append(("began", job.trial.name)),
        report=lambda *report: None,
        done=lambda job, outcome: heard.append(("done", job.trial.name, str(outcome))),
        status=lambda: None,
    )
    assert jobs.suggest("tune-1")
    tuned = SimpleNamespace(trial_id="tune-1", get_error=lambda: RuntimeError("no environment"))
    _Follow(jobs, hooks).on_trial_error(0, [], tuned)
    assert heard == [("began", "a"), ("done", "a", "its process died 4 times: no environment")]

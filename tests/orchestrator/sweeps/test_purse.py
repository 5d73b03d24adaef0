"""What was spent, what will be, and what the budget still holds."""

import pytest

from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.sweeps.prices import Budget
from orchestrator.sweeps.purse import Purse
from orchestrator.sweeps.queue import Job, TrialState, state_of
from orchestrator.sweeps.sweep import Trial


def state(name: str, flops: float, trunk: int = 0, workers: int = 1) -> TrialState:
    fields = {"train.steps": 100, "model.moe": None, "scale.workers": workers}
    if trunk:
        fields["train.trunk"] = f"/runs/trunk/checkpoints/step-{trunk:08d}"
    trial = Trial(name=name, arm=name, changes={}, run=override(RunConfig(), fields))
    return state_of(trial, cost=9 * flops, need={"CPU": 1}, flops=flops)


def job(one: TrialState, until: int = 100) -> Job:
    return Job(state=one, until=until)


@pytest.fixture
def clock(monkeypatch):
    """Seconds that the test moves on by itself."""
    now = [0.0]
    monkeypatch.setattr("orchestrator.sweeps.purse.time.monotonic", lambda: now[0])
    return now


def test_nothing_is_known_before_the_first_job_has_ended(tmp_path, clock):
    """It held 10 s for 1e9 FLOPs; one of 3e9 is then foretold to take 30 s, its first quarter 7.5 s."""
    purse = Purse(Budget(hours=35 / 3600), str(tmp_path))
    small, large = state("small", 1e9), state("large", 3e9)
    assert purse.admits(job(large), large)
    purse.begin(job(small), small)
    clock[0] = 10.0
    assert purse.paid(job(small), small) == 10.0
    assert purse.of_job(job(large), large) == pytest.approx(30)
    assert not purse.admits(job(large), large)  # 10 + 30 > 35
    assert purse.admits(job(large, until=25), large)
    large.reached[25] = 0.5
    assert purse.of_job(job(large), large) == pytest.approx(22.5)
    small.outcome = "over"
    assert purse.left_s([small, large]) == pytest.approx(22.5)


def test_time_is_taken_from_jobs_of_like_size(tmp_path, clock):
    """Small jobs took 10 s for 1e9 FLOPs, large ones 20 s for 1e11: nearly 10 s are for starting. A large one
    to come takes 19 s, not the 900 s of the small ones' rate.
    """
    purse = Purse(Budget(), str(tmp_path))
    for number, (flops, seconds) in enumerate([(1e9, 10.0), (1e11, 20.0)] * 4):
        one = state(f"{number}", flops)
        purse.begin(job(one), one)
        clock[0] += seconds
        purse.paid(job(one), one)
        assert purse.can_estimate() == (number >= 3)  # one or two say little
    small, large = state("small", 1.1e9), state("large", 0.9e11)
    for known in (purse, Purse(Budget(), str(tmp_path))):  # the next process knows it too
        assert known.of_job(job(small), small) == pytest.approx(10, rel=0.01)
        assert known.of_job(job(large), large) == pytest.approx(19, rel=0.01)


def test_what_running_jobs_have_done_is_not_left(tmp_path, clock):
    purse = Purse(Budget(), str(tmp_path), {"a": 20.0, "b": 10.0})
    a, b = state("a", 1e9), state("b", 1e9)
    purse.begin(job(a), a)
    clock[0] = 15.0
    assert purse.left_s([a, b]) == pytest.approx(5 + 10)


def test_what_was_spent_survives_the_process(tmp_path, clock):
    one = state("one", 1e9)
    for _ in range(2):
        purse = Purse(Budget(), str(tmp_path))
        purse.begin(job(one), one)
        clock[0] += 10.0
        purse.paid(job(one), one)
    assert Purse(Budget(), str(tmp_path)).spent_s == 20.0


@pytest.mark.parametrize("workers", [1, 2])
def test_running_jobs_count_what_they_will_take_or_have_taken(workers, tmp_path, clock):
    purse = Purse(Budget(hours=25 / 3600), str(tmp_path), {"a": 20.0, "b": 10.0, "c": 4.0})
    a, b, c = (state(name, 1e9, workers=workers) for name in "abc")
    purse.begin(job(a), a)
    assert not purse.admits(job(b), b)  # 20 + 10
    assert purse.admits(job(c), c)  # 20 + 4
    clock[0] = 23.0 / workers  # it takes longer than foretold
    assert not purse.admits(job(c), c)


def test_a_branch_pays_for_its_own_steps(tmp_path):
    """It leaves its trunk at step 75: a step of 100 is a twenty-fifth of what it does."""
    branch = state("branch", 1e9, trunk=75)
    assert (branch.begins_at, branch.part(100), branch.part(76)) == (75, 1.0, 0.04)
    purse = Purse(Budget(), str(tmp_path), {"branch": 50.0})
    assert purse.of_job(job(branch), branch) == 50.0

"""The price table, the bound of a budget, and the tracker of what was spent."""

import math
import re
from pathlib import Path
from typing import Any

import pytest

from orchestrator.checkpoint.manifest import MANIFEST, folder_of
from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.errors import UsageError
from orchestrator.runs.run_directory import Result, RunDir
from orchestrator.sweeps import budget
from orchestrator.sweeps.budget import PRICES, Budget, BudgetTracker, core_usd_per_hour, load_prices
from orchestrator.sweeps.queue import Job, RunToCompletion, TrialQueue, TrialState, new_trial_state
from orchestrator.sweeps.sweep import Trial


def test_the_price_table_of_the_project() -> None:
    prices = load_prices(PRICES)
    assert {"CPU-core", "CPU-node", "A10G", "A100-40", "A100-80", "H100-80", "H200"} == prices.keys()
    assert all(device.memory_gib for device in prices.values())


def test_every_price_has_a_source_and_a_day() -> None:
    """The price is that of the named instance per device, rounded."""
    sourced = r"usd_per_hour: (\S+) # \w+\.\w+ (\S+) / (\d+)(?: x (\d+))?: .+, \d+ \w+ 20\d\d\n"
    found = re.findall(sourced, Path(PRICES).read_text())
    assert len(found) == len(load_prices(PRICES))
    for price, instance, devices, times in found:
        assert float(price) == pytest.approx(float(instance) / int(devices) * int(times or 1), rel=0.02)


def test_a_core_has_a_price(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert core_usd_per_hour() == load_prices(PRICES)["CPU-core"].usd_per_hour
    monkeypatch.setattr(budget, "PRICES", str(tmp_path / "prices.yaml"))
    assert math.isnan(core_usd_per_hour()), "there is no table"
    for text in ("H100: {usd_per_hour: 7, peak_tflops: 989}", "CPU-core: {usd_per_hour: 0, peak_tflops: 1}"):
        (tmp_path / "prices.yaml").write_text(text)
        assert math.isnan(core_usd_per_hour())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- H100", "holds no devices"),
        ("{}", "holds no devices"),
        ("H100: {usd_per_hour: 7}", "H100 needs the fields usd_per_hour and peak_tflops, got"),
        ("H100: {usd_per_hour: 7, peak_tflops: 989, price: 3}", "unknown field price"),
        ("H100: {usd_per_hour: 7, peak_tflops: 0}", "peak_tflops must be positive, got 0"),
        ("H100: {usd_per_hour: 7", "is not YAML"),
    ],
)
def test_a_wrong_price_table_is_refused(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=says):
        load_prices(str(path))
    with pytest.raises(UsageError, match=r"no price table at .*none.yaml: copy jobs/prices.yaml"):
        load_prices(str(tmp_path / "none.yaml"))


def test_money_is_device_hours_at_the_price() -> None:
    """3 usd at 1.5 an hour are two hours; the smaller of two bounds counts."""
    assert Budget(usd=3, usd_per_hour=1.5).limit_s() == 7200
    assert Budget(usd=3, hours=1, usd_per_hour=1.5).limit_s() == 3600
    assert Budget().limit_s() == math.inf
    with pytest.raises(UsageError, match="`usd` 3 needs the price of a device"):
        Budget(usd=3)
    for hours in (0, -1, math.nan):
        with pytest.raises(UsageError, match=f"`hours` must be above 0, got {hours:g}"):
            Budget(hours=hours)
    with pytest.raises(UsageError, match="`owner_hours` must be above 0, got 0"):
        Budget(owner_hours=0)
    bounds = ({}, {"hours": 1}, {"usd": 1, "usd_per_hour": 1}, {"owner_hours": 1})
    assert [Budget(**bound).is_bound for bound in bounds] == [False, True, True, True]
    with pytest.raises(UsageError, match="`usd` must be above 0, got nan"):
        Budget(usd=math.nan, usd_per_hour=1)


def test_a_device_trains_at_a_part_of_its_peak() -> None:
    device = load_prices(PRICES)["H100-80"]
    assert device.flops_per_s(1.0) == device.peak_tflops * 1e12
    assert device.flops_per_s(0.4) == pytest.approx(0.4 * device.peak_tflops * 1e12)
    for mfu in (0.0, -0.1, 1.01, math.nan):
        with pytest.raises(UsageError, match="must be above 0 and at most 1: a part of 989 TFLOP/s"):
            device.flops_per_s(mfu)


def test_what_is_left_of_a_budget() -> None:
    """Money too; and no bound stays none."""
    assert Budget(hours=2).less(1800).limit_s() == 5400
    assert Budget(usd=3, usd_per_hour=1.5).less(1800).limit_s() == 5400
    assert Budget().less(1e9) == Budget()
    for spent_s in (7200, 7201):
        with pytest.raises(UsageError, match="Budget exhausted: 2 of 2 device-hours are spent"):
            Budget(hours=2).less(spent_s)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that the test advances itself."""
    now = [0.0]
    monkeypatch.setattr("orchestrator.sweeps.budget.time.monotonic", lambda: now[0])
    return now


class Trials:
    """Trials of 100 steps, and jobs of a tracker whose durations the test decides."""

    def __init__(self, folder: Path, clock: list[float]) -> None:
        self.folder = folder
        self.clock = clock

    def tracker(self, hours: float | None = None, **options: Any) -> BudgetTracker:
        return BudgetTracker(Budget(hours=hours), str(self.folder), **options)

    def make(self, name: str, flops: float, trunk: int = 0, workers: int = 1) -> TrialState:
        fields = {"train.steps": 100, "model.moe": None, "scale.workers": workers, "name": name}
        fields["storage"] = str(self.folder)
        if trunk:
            fields["train.trunk"] = f"/runs/trunk/checkpoints/step-{trunk:08d}"
        trial = Trial(name=name, arm=name, changes={}, run=override(RunConfig(), fields))
        return new_trial_state(trial, cost=9 * flops, need={"CPU": 1}, flops=flops)

    def work(
        self, tracker: BudgetTracker, state: TrialState, seconds: float, outcome: Result | str | None = None
    ) -> None:
        tracker.begin(job(state))
        self.clock[0] += seconds
        tracker.record(job(state), finished() if outcome is None else outcome)


def test_what_running_jobs_hold_is_counted(tmp_path: Path, clock: list[float]) -> None:
    """Twice the seconds with two workers; nothing of a job that has ended."""
    trials = Trials(tmp_path, clock)
    tracker = trials.tracker()
    one, two = trials.make("one", 1e9), trials.make("two", 1e9, workers=2)
    tracker.begin(job(one))
    tracker.begin(job(two))
    clock[0] += 10
    assert (tracker.spent_s, tracker.held_s()) == (0, 30)
    tracker.record(job(two), finished())
    assert (tracker.spent_s, tracker.held_s()) == (20, 10)


def save_at(state: TrialState, step: int) -> None:
    """A checkpoint of the trial."""
    saved = Path(folder_of(RunDir.of(state.trial.run).checkpoints, step))
    saved.mkdir(parents=True)
    (saved / MANIFEST).touch()


def job(state: TrialState, until: int = 100) -> Job:
    return Job(state=state, until=until)


def finished(step: int = 100) -> Result:
    return Result(status="finished", step=step, metrics={"val/acc1": 0.5})


@pytest.fixture
def trials(tmp_path: Path, clock: list[float]) -> Trials:
    return Trials(tmp_path, clock)


def test_predictions_follow_jobs_that_ended(trials: Trials) -> None:
    """10 s for 1e9 FLOPs predict 30 s for 3e9, and 7.5 s for a quarter of them."""
    tracker = trials.tracker(hours=35 / 3600)
    small, large = trials.make("small", 1e9), trials.make("large", 3e9)
    assert tracker.admits(job(large), large)  # nothing is known yet
    trials.work(tracker, small, 10)
    assert tracker.spent_s == 10
    assert not tracker.admits(job(large), large)  # 10 + 30 > 35
    assert tracker.admits(job(large, until=25), large)
    large.reached[25] = 0.5
    small.outcome = finished()
    assert tracker.remaining_s([small, large]) == pytest.approx(22.5)
    branch = trials.make("branch", 1e9, trunk=75)  # pays for its own steps
    assert tracker.remaining_s([branch]) == pytest.approx(10)


def test_a_rate_predicts_before_the_first_job_has_ended(trials: Trials) -> None:
    tracker = trials.tracker(hours=35 / 3600, flops_per_s=1e8)
    assert not tracker.admits(job(four := trials.make("four", 4e9)), four)  # 40 s
    assert trials.tracker(hours=40 / 3600, flops_per_s=1e8).admits(job(four), four)
    trials.work(tracker, trials.make("one", 1e9), 5)
    assert tracker.admits(job(four), four)  # 5 + 20


def test_durations_come_from_jobs_of_similar_size(trials: Trials) -> None:
    """Small jobs took 10 s for 1e9 FLOPs, large ones 20 s for 1e11: nearly 10 s are for starting. A large job
    to come takes 19 s, not the 900 s of the rate of small ones.
    """
    tracker = trials.tracker()
    for number, (flops, seconds) in enumerate([(1e9, 10.0), (1e11, 20.0)] * 4):
        trials.work(tracker, trials.make(f"{number}", flops), seconds)
        assert tracker.can_estimate() == (number >= 3)  # one or two say little
    for known in (tracker, trials.tracker()):  # the next process knows it too
        assert known.predict_s(1.1e9) == pytest.approx(10, rel=0.01)
        assert known.predict_s(0.9e11) == pytest.approx(19, rel=0.01)
        assert known.spent_s == 120
        assert known.predict_s(0) == 0, "nothing is left to train"


@pytest.mark.parametrize(
    ("ended", "flops", "seconds"),
    [
        ([(1e9, 30), (2e9, 20)], 5e9, 250 / 3),  # a line through both is below 0 from 4e9 on
        ([(1e9, 1), (2e9, 10)], 1e8, 11 / 30),  # and here below 9e8
        ([(1e9, 10), (1.05e9, 10.1)], 5e9, 5e9 * 20.1 / 2.05e9),  # too much alike to tell the start apart
        ([(1e9, 10), (2e9, 15)], 5e9, 30),
    ],
)
def test_a_prediction_is_a_line_only_where_it_can_be(
    ended: list[tuple[float, float]], flops: float, seconds: float, trials: Trials
) -> None:
    """Neither starting nor training takes less than no time: else all FLOPs cost the same."""
    tracker = trials.tracker()
    for number, (size, taken) in enumerate(ended):
        trials.work(tracker, trials.make(f"{number}", size), taken)
    assert tracker.predict_s(flops) == pytest.approx(seconds)


def test_the_eight_jobs_nearest_in_size_predict(trials: Trials) -> None:
    """By their ratio: a fourth of them is nearer than ten times as many."""
    tracker = trials.tracker()
    for number, (flops, seconds) in enumerate([(4e9, 40.0), (1e8, 100.0)] * 8):
        trials.work(tracker, trials.make(f"{number}", flops), seconds)
    assert tracker.predict_s(1e9) == pytest.approx(10)


@pytest.mark.parametrize("workers", [1, 2])
def test_running_jobs_count_their_prediction_or_more(workers: int, trials: Trials) -> None:
    tracker = trials.tracker(hours=25 / 3600, flops_per_s=1e8)
    a, b, c = (trials.make(name, n * 1e8, workers=workers) for name, n in (("a", 20), ("b", 10), ("c", 4)))
    tracker.begin(job(a))
    assert not tracker.admits(job(b), b)  # 20 + 10
    assert tracker.admits(job(c), c)  # 20 + 4
    trials.clock[0] = 15.0 / workers
    assert tracker.remaining_s([a, b]) == pytest.approx(5 + 10)
    trials.clock[0] = 23.0 / workers  # longer than predicted
    assert not tracker.admits(job(c), c)


def test_a_running_job_needs_the_steps_after_its_checkpoint(trials: Trials) -> None:
    """20 of 100 s; never less than none, and what has ended needs nothing."""
    tracker = trials.tracker(flops_per_s=1e7)
    resumed, other, ended = (trials.make(name, 1e9) for name in ("resumed", "other", "ended"))
    save_at(resumed, 80)
    ended.outcome = "out of memory"
    tracker.begin(job(resumed))
    for now, needed in ((0.0, 20), (5.0, 15), (50.0, 0)):
        trials.clock[0] = now
        assert tracker.remaining_s([resumed]) == pytest.approx(needed)
        assert tracker.remaining_s([resumed, other, ended]) == pytest.approx(needed + 100)


def test_what_runs_is_known_to_the_next_process_at_every_start_and_end(trials: Trials) -> None:
    """This one is killed after each of them."""
    tracker = trials.tracker()
    for name, seconds in (("a", 5.0), ("b", 7.0)):
        tracker.begin(job(trials.make(name, 1e9)))
        assert trials.tracker().spent_s == (5 if name == "b" else 0)
        trials.clock[0] += seconds
    tracker.record(job(trials.make("a", 1e9)), finished())
    assert trials.tracker().spent_s == 12 + 7


def test_every_process_pays_the_price_of_its_devices(trials: Trials) -> None:
    """The second is killed while a job runs; the third has no price."""
    for price, name, seconds in ((3.6, "a", 10.0), (7.2, "b", 5.0)):
        tracker = BudgetTracker(Budget(usd_per_hour=price), str(trials.folder))
        tracker.begin(job(state := trials.make(name, 1e9)))
        trials.clock[0] += seconds
        tracker.record(job(state), finished()) if name == "a" else tracker.save()
    for _ in range(2):
        tracker = trials.tracker()
        assert (tracker.spent_s, tracker.spent_usd) == (15, pytest.approx(0.02))
        tracker.save()


def test_a_job_that_was_admitted_stays_so_when_its_process_dies(trials: Trials) -> None:
    tracker = trials.tracker(hours=35 / 3600, flops_per_s=1e8)
    begun, other = trials.make("begun", 2e9), trials.make("other", 1.6e9)
    tracker.begin(job(begun))
    trials.clock[0] = 19.0
    assert tracker.admits(job(begun), begun)
    assert not tracker.admits(job(other), other)  # 20 + 16


def test_a_failed_job_does_not_make_others_look_cheap(trials: Trials) -> None:
    """One trial took 1000 s and two failed after 2 s: the next one takes 1000 s, which half an hour minus
    1004 s does not hold.
    """
    tracker = trials.tracker(hours=0.5)
    trials.work(tracker, trials.make("whole", 1e9), 1000)
    for name in "ab":
        trials.work(tracker, trials.make(name, 1e9), 2, "out of memory")
    assert tracker.spent_s == 1004
    assert tracker.predict_s(1e9) == pytest.approx(1000)
    assert not tracker.admits(job(late := trials.make("late", 1e9)), late)


def test_only_steps_that_a_job_trained_count(trials: Trials) -> None:
    """A job that continues at the checkpoint of step 80 or at a pause there, a branch of the last fifth, and
    a job that ends at step 20 of 100."""
    resumed, paused, early = (trials.make(name, 1e9) for name in ("resumed", "paused", "early"))
    save_at(resumed, 80)
    paused.reached[80] = 0.5
    branch = trials.make("branch", 0.2e9, trunk=80)
    cases = [(each, finished()) for each in (resumed, paused, branch)]
    for state, outcome in (*cases, (early, finished(step=20))):
        tracker = trials.tracker()
        trials.work(tracker, state, 200, outcome)
        assert tracker.predict_s(1e9) == pytest.approx(1000)
        Path(trials.folder, "spent.json").unlink()
    ahead, tracker = trials.make("ahead", 1e9), trials.tracker(flops_per_s=1e9)
    save_at(ahead, 80)  # of a process that was given more steps
    trials.work(tracker, ahead, 200, finished(step=50))
    assert tracker.predict_s(1e9) == 1


def test_reports_are_saved_every_half_minute(trials: Trials) -> None:
    tracker, file, saved = trials.tracker(), Path(trials.folder, "spent.json"), []
    tracker.begin(job(trials.make("a", 1e9)))
    for second in range(1, 100):
        file.unlink(missing_ok=True)
        trials.clock[0] = second
        tracker.report("a", second, second)
        saved += [second] * file.exists()
    assert saved == [31, 62, 93]


@pytest.mark.parametrize("killed", [True, False])
def test_what_runs_when_the_process_ends_is_charged_and_teaches_its_pace(
    killed: bool, trials: Trials
) -> None:
    """Two workers for 60 s, in 40 of which 50 of 100 steps were reported: 160 device-seconds for all steps. A
    killed process had written that 10 s before.
    """
    state = trials.make("a", 1e9, workers=2)
    tracker = trials.tracker()
    tracker.begin(job(state))
    for seconds, step in ((10, 10), (20, 30), (20, 60)):
        trials.clock[0] += seconds
        tracker.report("a", step, trials.clock[0])
    if not killed:
        trials.clock[0] += 10
        tracker.leave()
    for process in range(2):
        again = trials.tracker(hours=300 / 3600)
        assert again.spent_s == (100 if killed else 120), process
        assert again.predict_s(1e9) == pytest.approx(160)
        assert not again.admits(job(other := trials.make("b", 2e9)), other)
        again.save()


@pytest.mark.parametrize(("step", "time_s"), [(10, 40.0), (5, 40.0), (30, -3600.0)])
def test_a_pace_without_steps_or_time_teaches_nothing(step: int, time_s: float, trials: Trials) -> None:
    """A trial began again, and reported the steps that it had reported before; or a clock was set back. The
    time is spent all the same, and the next process still predicts.
    """
    tracker = trials.tracker()
    tracker.begin(job(trials.make("a", 1e9)))
    for at, when in ((10, 10.0), (step, time_s)):
        trials.clock[0] += 10
        tracker.report("a", at, when)
    tracker.leave()
    again = trials.tracker(hours=1)
    assert again.spent_s == 20
    assert again.predict_s(1e9) == 0


def test_a_refusal_that_has_passed_leaves_the_sweep_within_its_budget(trials: Trials) -> None:
    """While `a` runs its prediction of 90 s leaves no room for `b`; it ends early, and `b` fits."""
    tracker = trials.tracker(hours=100 / 3600, flops_per_s=1e7)
    a, b = trials.make("a", 9e8), trials.make("b", 9e8)
    queue = TrialQueue(
        [a, b],
        RunToCompletion(),
        cluster_resources=lambda: {"CPU": 2},
        quality="val/acc1",
        admits=tracker.admits,
    )
    for refused in (True, False):
        started = queue.next()
        assert started
        tracker.begin(started)
        assert queue.next() is None
        assert queue.out_of_budget == refused
        trials.clock[0] += 10.0
        tracker.record(started, finished())
        queue.done(started.trial.name, finished())
    assert queue.next() is None
    assert not queue.out_of_budget
    assert tracker.spent_s == 20

"""`jobs/train.py` as a user runs it."""

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from mlflow import MlflowClient

from jobs import pareto_sweep, train
from orchestrator.codec import flat, override
from orchestrator.config import RunConfig
from orchestrator.sweeps.sweep import Sweep
from orchestrator.tracking.store import EXPERIMENT, open_reader
from orchestrator.tracking.tensorboard import read_events
from tests.made_directories import begin_sweep
from tests.mlflow_reader import find_run

ROOT = Path(__file__).parents[2]
SHORT = ["--set", "train.steps=4", "--set", "train.report_every=2"]


@pytest.fixture
def home(empty_store: Callable[[Path], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A storage of its own, with no runs in it."""
    empty_store(tmp_path)
    monkeypatch.setenv("MOE_FRONTIER_HOME", str(tmp_path))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return tmp_path


def statuses(home: Path) -> dict[str, str]:
    client = MlflowClient(f"sqlite:///{home}/mlflow.db")
    runs = client.search_runs([e.experiment_id for e in client.search_experiments()])
    return {str(run.info.run_name): run.info.status for run in runs}


def test_what_is_trained_is_said_first(home, call):
    """41 of the 367 validation images are of the largest class; 4 steps of 64 are 0.179 of 1,430 images."""
    stopped, said = call(train.main, "--name", "soft", *SHORT, "--set", "model.moe.router.kind=soft")
    assert stopped == ""
    first, what, *_ = said.splitlines()
    assert first == "training soft: loading libraries .."
    assert what == (
        "soft: vit of size w32d2p2 with 8 soft experts in blocks [1], images of"
        " 8 x 8 px, batch 64, 4 steps = 0.179 epochs of 1,430 images; always guessing the largest class:"
        " val/acc1 0.1117"
    )
    assert re.search(r"step 2/4  train/loss", said)
    stopped, said = call(train.main, "--name", "large", *SHORT, "--set", "model.image_size=16")
    assert "dense vit of size w32d2p2, without experts" in said
    assert "images of 16 x 16 px (the data's median: 8 x 8 px), batch" in said


def test_data_that_repeat_often_are_named(home, call):
    """300 epochs of 1,430 images are 6,703 steps of 64. With one more step the first lines say so."""
    for steps, named in ((6703, False), (6704, True)):
        run = ["--name", f"run{steps}", "--set", f"train.steps={steps}", "--tracking-uri", "bogus://x"]
        _, said = call(train.main, *run)
        assert ("more than 300" in said) == named


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--data", "/nowhere"], "no data set at /nowhere"),
        (["--set", "train.stepz=1"], r"unknown field train.stepz; train has: steps, lr"),
        (["--workers", "3"], "data.batch_size=64 does not divide over workers=3"),
        (["--storage", "s3://bucket/runs"], "s3://bucket/runs holds no MLflow store"),
        (["--storage", str(ROOT / "README.md")], "--storage .*/README.md cannot be written to: "),
        (["--storage", "/proc/x"], "--storage /proc/x cannot be written to: No such file"),
        (["--set", "data.batch_size=2000"], "batch_size=2000 is more than the 1430 training images of"),
        (["--init-from", "nosuch"], "--init-from nosuch: no trained model 'nosuch'"),
        (["--init-from", ""], "--init-from : no trained model ''"),
        (["--set", "name=elsewhere"], "use --name"),
        (["--set", "data.path=/x"], "use --data"),
        (["--tracking-uri", "bogus://x"], "MLflow refuses the tracking URI bogus://x"),
        (["--tracking-uri", "http://127.0.0.1:9"], "no MLflow server answers at http://127.0.0.1:9"),
    ],
)
def test_bad_input_is_one_clear_line(flags, message, home, call):
    stopped, _ = call(train.main, *flags)
    assert re.search(f"^error: .*{message}", stopped)
    assert "\n" not in stopped


def test_a_name_with_data_of_its_own_wants_them_again(home, call, monkeypatch):
    """The cause is named, and not what follows from it."""
    monkeypatch.setattr("orchestrator.packing.pack.digits", lambda root, source: f"{root}/data/{source}")
    base = override(RunConfig(), {"name": "stamps", "storage": str(home), "data.path": "/data/stamps"})
    begin_sweep(Sweep(base=base, arms={"a": {}}))
    stopped, _ = call(pareto_sweep.main, "--name", "stamps")
    assert stopped == (
        f"error: {home}/stamps was trained on /data/stamps, and without --data it would be"
        f" {home}/data/cluttered-digits: give --data /data/stamps, or use another --name"
    )


def test_set_help_shows_every_field(home, call):
    for main in (train.main, pareto_sweep.main):
        stopped, shown = call(main, "--set", "help")
        assert stopped == ""
        for field in (
            "model.moe.router.slots_per_expert = 1",
            "train.schedule.timescale = 10000",
            "scale.ep = 1",
        ):
            assert field in shown


def test_train_completes_resumes_and_refuses_another_config(home, call):
    """Once through everything that --resume and --fresh promise."""
    soft = ["--name", "soft", "--set", "model.moe.router.kind=soft", "--set", "train.steps=10"]
    assert "nothing to resume" in call(train.main, *soft, "--resume")[0]
    assert "did you mean 'tensorboard'?" in call(train.main, *soft, "--tracker", "tensorbord")[0]
    stopped, first = call(train.main, *soft, "--tracker", "tensorboard")
    assert stopped == ""
    (events,) = (home / "soft" / "tensorboard").iterdir()
    assert {each.name for each in read_events(events.read_bytes())} >= {"train/loss", "val/acc1"}
    assert "step 10/10  train/loss" in first
    assert "soft is complete: finished after 10 steps" in first
    stopped, again = call(train.main, *soft)
    assert stopped == ""
    assert "step 10/10" not in again
    assert "soft is complete" in again

    changed = [*soft, "--set", "train.lr=0.5"]
    assert "another config (train.lr: 0.001 -> 0.5)" in call(train.main, *changed)[0]
    assert call(train.main, *soft, "--set", "train.microbatch=16")[0] == ""
    assert call(train.main, *changed, "--fresh")[0] == ""
    assert {path.name for path in home.iterdir()} >= {"soft", "soft.old-1"}

    client = MlflowClient(f"sqlite:///{home}/mlflow.db")
    runs = client.search_runs([client.get_experiment_by_name(EXPERIMENT).experiment_id])
    assert [run.info.status for run in runs] == ["FINISHED", "FINISHED"]
    for run in runs:
        losses = client.get_metric_history(run.info.run_id, "train/loss")
        assert [loss.step for loss in losses] == [640]
    rebuilt = find_run(open_reader(f"sqlite:///{home}/mlflow.db"), runs[0].info.run_id).config()
    config = {name: str(value) for name, value in flat(rebuilt).items()}
    assert config.items() <= runs[0].data.params.items()
    assert rebuilt.train.lr == 0.5


def test_a_run_that_diverged_has_failed(home, call):
    stopped, said = call(train.main, "--name", "hot", *SHORT, "--set", "train.lr=1e9")
    assert re.fullmatch(r"error: hot diverged: train/loss is nan at step \d", stopped)
    assert "hot diverged after" in said
    assert statuses(home) == {"hot": "FAILED"}
    assert call(train.main, "--name", "hot", *SHORT, "--set", "train.lr=1e9")[0] == stopped  # and stays so


def test_weights_by_any_name_of_a_model(home, call):
    """A run's name, folder or checkpoints. Weights that do not fit are refused before a run is made."""
    assert call(train.main, "--name", "first", *SHORT)[0] == ""
    assert statuses(home) == {"first": "FINISHED"}
    stopped, _ = call(train.main, "--name", "wide", *SHORT, "--init-from", "first", "--set", "model.width=64")
    assert re.match(r"error: nothing in .*/first/checkpoints/step-00000004 fits the model", stopped)
    stopped, _ = call(train.main, "--name", "wide", *SHORT, "--init-from", "sweep:first")
    assert "sweep:first names several models" in stopped
    assert list(statuses(home)) == ["first"]
    assert not (home / "wide").exists()

    for number, place in enumerate(("first", f"{home}/first", f"{home}/first/checkpoints")):
        name = f"next{number}"
        stopped, _ = call(train.main, "--name", name, *SHORT, "--init-from", place)
        assert (stopped, statuses(home)[name]) == ("", "FINISHED")
    shutil.rmtree(home / "first")  # what has begun needs it no more
    again = call(train.main, "--name", "next0", *SHORT, "--init-from", "first")
    assert again[0] == ""
    assert "next0 is complete" in again[1]
    for wrong in ("nosuch", "sweep:first", ""):  # what it did not begin from is no longer let pass
        assert "--init-from" in call(train.main, "--name", "next0", *SHORT, "--init-from", wrong)[0]


def test_a_name_is_not_burnt_by_a_run_that_never_trained(home, call, monkeypatch):
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr("orchestrator.training.fit.train_worker", broken)
        assert call(train.main, "--name", "run", *SHORT)[0] == "error: run failed: no memory"
    assert call(train.main, "--name", "run", *SHORT, "--set", "train.lr=0.5")[0] == ""
    client = MlflowClient(f"sqlite:///{home}/mlflow.db")
    runs = client.search_runs([e.experiment_id for e in client.search_experiments()])
    rates = {run.info.status: run.data.params["train.lr"] for run in runs}
    assert rates == {"FAILED": "0.001", "FINISHED": "0.5"}


def test_signals_are_given_back(home, call, monkeypatch):
    """A command that runs inside another process leaves its handlers as they were."""
    import signal

    before = signal.getsignal(signal.SIGTERM)
    call(train.main, "--name", "none", "--data", "/nowhere")
    assert signal.getsignal(signal.SIGTERM) is before
    assert sys.argv[1:3] == ["--name", "none"]

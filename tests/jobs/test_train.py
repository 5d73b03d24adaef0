"""One run as a user starts it: what is said before and after, what failed, what it starts from."""

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from mlflow import MlflowClient

from jobs import train

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
        "soft: ViT with 8 soft experts in blocks [1] (width 32, 2 blocks, patches of 2 px), images of"
        " 8 x 8 px, batch 64, 4 steps = 0.179 epochs of 1,430 images; always guessing the largest class:"
        " val/acc1 0.1117"
    )
    assert re.search(r"step 2/4  train/loss", said)
    stopped, said = call(train.main, "--name", "large", *SHORT, "--set", "model.image_size=16")
    assert "dense ViT without experts (" in said
    assert "images of 16 x 16 px (the data's own: 8 x 8 px), batch" in said


def test_data_that_repeat_often_are_named(home, call):
    """300 epochs of 1,430 images are 6,703 steps of 64. With one more step the first lines say so."""
    for steps, named in ((6703, False), (6704, True)):
        run = ["--name", f"run{steps}", "--set", f"train.steps={steps}", "--tracking-uri", "bogus://x"]
        _, said = call(train.main, *run)
        assert ("more than 300" in said) == named


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

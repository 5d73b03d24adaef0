"""Cooldown branches: equal to runs of their own, and charged for what they did."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moe.cost import train_flops_6mac
from moe.models.vit import ViT
from orchestrator.checkpoint.files import load_state
from orchestrator.checkpoint.manifest import find_checkpoint
from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.data.stream import in_process
from orchestrator.errors import UsageError
from orchestrator.frontier.frontier import Frontier
from orchestrator.runs.metrics_file import Metrics
from orchestrator.runs.run_directory import RunDir
from orchestrator.sweeps import run as sweep_run
from orchestrator.sweeps.run import keep_weights_only
from orchestrator.sweeps.sweep import Sweep, Trunk, trial_config
from orchestrator.training.fit import start
from orchestrator.training.train import resolved
from orchestrator.training.worker import train_worker
from tests.lanes import mostly_slow
from tests.orchestrator.frontier.samples import point

ARMS = {"soft": {"model.moe.router.kind": "soft", "model.moe.num_experts": 2}}


@pytest.fixture
def sweep(digits: str, tmp_path: Path) -> Sweep:
    changes = {
        "name": "tiny",
        "data.path": digits,
        "storage": str(tmp_path / "home"),
        "train.report_every": 1,
    }
    base = override(RunConfig(), changes | {"train.schedule.timescale": 5})
    return Sweep(base=base, arms=ARMS, trunk=Trunk(at=(6, 9), cooldown=3))


def train(run: RunConfig) -> list[tuple[int, Metrics]]:
    reports: list[tuple[int, Metrics]] = []
    train_worker(run, report=lambda step, metrics: reports.append((step, metrics)), read=in_process)
    return reports


@pytest.mark.parametrize("kind", mostly_slow(["rsqrt", "constant"], fast=["rsqrt"]))
def test_a_branch_equals_a_run_of_its_own_and_costs_its_own_steps(sweep, kind):
    sweep = replace(sweep, base=override(sweep.base, {"train.schedule.kind": kind}))
    trials = sweep.trials()
    assert list(trials) == ["soft-trunk", "soft-at6", "soft-at9"]
    assert [trial.role for trial in trials.values()] == ["trunk", "trial", "trial"]
    train(trials["soft-trunk"].run)
    for name, at in (("soft-at6", 6), ("soft-at9", 9)):
        branch = trials[name].run
        alone = override(branch, {"name": f"alone/{name}", "train.trunk": None})
        reports, whole = train(branch), train(alone)
        assert [step for step, _ in reports] == list(range(at + 1, at + 4))
        for (step, mine), (_, theirs) in zip(reports, whole[at:], strict=True):
            assert mine["train/lr"] == theirs["train/lr"]
            assert mine["train/loss"] == pytest.approx(theirs["train/loss"], abs=1e-6), step
            assert mine["data/fingerprint"] == theirs["data/fingerprint"]
        weights = []
        for run in (branch, alone):
            model = ViT(run.model)
            load_state(*find_checkpoint(RunDir.of(run).checkpoints), model)
            weights.append(model.state_dict())
        for key, value in weights[0].items():
            torch.testing.assert_close(value, weights[1][key], rtol=0, atol=1e-6)

        ended = RunDir.of(branch).result()
        assert ended is not None
        batch = branch.data.batch_size
        assert ended.metrics["cost/train_flops_6mac"] == train_flops_6mac(branch.model, (at + 3) * batch)
        assert ended.metrics["cost/marginal_train_flops_6mac"] == train_flops_6mac(branch.model, 3 * batch)
        assert 0 < ended.metrics["cost/marginal_device_s"] < ended.metrics["cost/device_s"]


def test_trunks_keep_their_optimizer(sweep, monkeypatch):
    """More branches may start from a trunk, although it is not a point of the frontier."""
    dropped: list[str] = []
    monkeypatch.setattr(sweep_run.RunDir, "result", lambda run: True)
    monkeypatch.setattr(sweep_run, "drop_optimizer", lambda directory: dropped.append(directory) or 1)
    points = (point("soft-at6", "soft", 1.0, 0.9), point("soft-at9", "soft", 2.0, 0.8))
    frontier = Frontier(
        name="", cost_name="c", quality_name="q", points=points, reference={"c": 3.0, "q": 0.1}
    )
    trials = sweep.trials()
    assert keep_weights_only(trials.values(), frontier) == 1
    assert dropped == [RunDir.of(trials["soft-at9"].run).checkpoints]


def test_a_branch_of_another_run_is_refused(sweep):
    trials = sweep.trials()
    train(trials["soft-trunk"].run)
    branch = trials["soft-at6"].run
    with pytest.raises(UsageError, match=r"cannot branch from .*: train.seed: 0 -> 1"):
        train(override(branch, {"train.seed": 1, "name": "other-seed"}))
    with pytest.raises(UsageError, match=r"at step 6: at step 1 its learning rate would be"):
        train(override(branch, {"train.schedule.warmup_steps": 5, "name": "other-rate"}))
    with pytest.raises(UsageError, match="no checkpoint to branch from"):
        train(override(branch, {"train.trunk": "/nowhere/step-00000006", "name": "nowhere"}))


def test_trunks_that_cannot_be(sweep):
    with pytest.raises(UsageError, match=r"steps that rise from 1, got \(6, 6\)"):
        Trunk(at=(6, 6), cooldown=1)
    with pytest.raises(UsageError, match=r"needs train\.schedule\.kind=rsqrt or constant, got 'cosine'"):
        replace(sweep, base=override(sweep.base, {"train.schedule.kind": "cosine"})).trials()
    with pytest.raises(UsageError, match="leaves at step 6, within warmup_steps=8"):
        replace(sweep, base=override(sweep.base, {"train.schedule.warmup_steps": 8})).trials()


def test_the_run_of_a_seed_is_its_changes_of_the_base(sweep: Sweep) -> None:
    for each in (replace(sweep, trunk=None), sweep):
        trials = replace(each, seeds=(3, 5)).trials()
        assert {trial.run.train.seed for trial in trials.values()} == {3, 5}
        for trial in trials.values():
            assert trial.run == trial_config(sweep.base, trial.name, trial.changes)


def test_a_seed_that_no_run_takes_is_refused(sweep: Sweep) -> None:
    with pytest.raises(ValueError, match=r"seeds must be .*, and -1 must not be negative, got \(2, -1\)"):
        replace(sweep, seeds=(2, -1))


def test_configs_are_built_once(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    """One config for each trial of a sweep, however often it is asked for them, and none for a run that is
    resolved already."""
    sweep = replace(sweep, arms=ARMS | {"dense": {}}, trunk=None, seeds=(0, 1, 2))
    made, checked = list[RunConfig](), RunConfig.__post_init__
    monkeypatch.setattr(RunConfig, "__post_init__", lambda run: (made.append(run), checked(run))[1])
    runs = [sweep.runs(), sweep.runs()][1]
    assert len(made) == len(runs) + 1  # and the base on its devices
    run = runs["soft-seed0"]
    assert sweep.based_on(sweep.base) is sweep
    assert resolved(run) is run
    assert start(run) is run
    assert len(made) == len(runs) + 1

"""The sizes that a run can have: the same global batch, passes no larger than before."""

import pytest

from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.training import fit as fit_file
from orchestrator.training.fit import largest_schedulable, resize

SOFT = {"model.moe.router.kind": "soft", "model.moe.num_experts": 8, "data.batch_size": 64}


def run_of(**changes: object) -> RunConfig:
    return override(RunConfig(), SOFT | {"scale.workers": 8} | changes)


@pytest.mark.parametrize(
    ("workers", "passes"),
    [(8, 1), (4, 2), (2, 4), (1, 8)],  # of 64 images, 8 per worker and pass
)
def test_fewer_workers_make_more_passes(workers, passes):
    small = resize(run_of(), workers)
    assert small.data.batch_size == 64
    assert small.images_per_pass() == 8
    assert small.data.batch_size // workers // small.images_per_pass() == passes


@pytest.mark.parametrize("workers", [3, 5, 6, 7])
def test_sizes_that_do_not_divide_are_none(workers):
    """64 images lie in 16 lanes."""
    assert resize(run_of(), workers) is None


def test_a_pass_is_never_larger_and_holds_whole_groups():
    """96 images over 8 workers are 12 each; over 6, 16 each: passes of 8, for 12 do not divide 16."""
    wide = {"model.width": 48, "model.mlp_dim": 192}  # what six workers can share
    run = run_of(**{"data.batch_size": 96, "data.lanes": 48, "model.moe.images_per_group": 4}, **wide)
    small = resize(run, 6)
    assert small.images_per_pass() == 8
    assert resize(run, 4).images_per_pass() == 12


@pytest.mark.parametrize(
    ("workers", "ep"),
    [(4, 4), (2, 2), (1, 1)],
)
def test_groups_of_experts_shrink_when_they_must(workers, ep):
    assert resize(run_of(**{"scale.ep": 4}), workers).scale.ep == ep


def test_copies_of_the_model_shrink_too():
    """8 workers as 4 copies of ep 2; of 4 workers 2 copies; of 2 workers one."""
    run = run_of(**{"scale.ep": 2, "scale.dp_replicate": 4})
    assert [resize(run, n).scale.dp_replicate for n in (8, 4, 2)] == [4, 2, 1]


@pytest.mark.parametrize(("there", "chosen"), [(7, 4), (2, 2), (1, None)])
def test_as_many_workers_as_are_there_and_allowed(there, chosen, monkeypatch):
    """8, 4, 2 and 1 workers divide the batch; `min_workers=2` forbids the last."""
    monkeypatch.setattr(fit_file, "can_schedule", lambda one, within_s: one.scale.workers <= there)
    found = largest_schedulable(run_of(**{"scale.min_workers": 2}))
    assert (found and found.scale.workers) == chosen


def test_bounds():
    with pytest.raises(ValueError, match="min_workers=3 is more than workers=2"):
        override(RunConfig(), {"scale.workers": 2, "scale.min_workers": 3})
    with pytest.raises(ValueError, match="wait_s"):
        override(RunConfig(), {"scale.wait_s": 0})

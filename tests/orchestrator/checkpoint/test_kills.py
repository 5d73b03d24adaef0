"""After SIGKILL at any storage operation, a run continues from its last saved step, with its numbers."""

import pytest

from tests.orchestrator.checkpoint.counted import step_restored
from tests.orchestrator.checkpoint.lives import Plan, check, died_saving, live

STRIDES = [pytest.param(12, 4, marks=pytest.mark.smoke), pytest.param(50, 1, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("count", "stride"), STRIDES)
def test_kills_at_every_operation(count, stride, tmp_path):
    """Restoring, saving and the removal of old checkpoints are about 50 operations, of which the smoke lane
    takes every fourth; the lives of two ranks are killed at a few of theirs.
    """
    plans = {
        "one rank": Plan(f"{tmp_path}/one", lives=count, stride=stride),
        "two ranks": Plan(f"{tmp_path}/two", lives=3, stride=7, ranks=2),
    }
    found = live(plans)
    for lives in found.values():
        check(lives)
    assert died_saving(found["one rank"]) > count / 2
    assert step_restored(f"{tmp_path}/one")


@pytest.mark.slow
def test_many_kills(tmp_path):
    plans = {
        "beside training": Plan(f"{tmp_path}/beside", lives=40, stride=3),
        "in step": Plan(f"{tmp_path}/in step", lives=50, asynchronous=False),
        "two ranks": Plan(f"{tmp_path}/two", lives=12, stride=5, ranks=2),
    }
    for lives in live(plans).values():
        check(lives)
        assert died_saving(lives) > len(lives) / 3

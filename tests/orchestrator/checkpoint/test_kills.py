"""SIGKILL at any moment: a run continues from its last saved step, with exactly that step's numbers."""

import pytest

from tests.orchestrator.checkpoint.counted import saved, step_restored
from tests.orchestrator.checkpoint.lives import THE_END, Plan, check, died_saving, live


@pytest.mark.smoke
def test_a_few_kills(tmp_path):
    plans = {"one": Plan(f"{tmp_path}/one", lives=6), "two": Plan(f"{tmp_path}/two", lives=2, ranks=2)}
    for lives in live(plans).values():
        check(lives)


@pytest.mark.slow
def test_many_kills(tmp_path):
    plans = {
        "beside training": Plan(f"{tmp_path}/beside", lives=25),
        "in step": Plan(f"{tmp_path}/in step", lives=25, asynchronous=False),
        "two ranks": Plan(f"{tmp_path}/two", lives=6, ranks=2),
    }
    for name, lives in live(plans).items():
        check(lives)
        assert name == "two ranks" or died_saving(lives) >= len(lives) * 2 / 3


@pytest.mark.smoke
def test_around_every_operation(tmp_path):
    """Before and after each; the removal of old checkpoints, and of what the life before left, are among
    them.
    """
    template = saved(tmp_path / "template", 1, 2)
    (template / "step-00000003.0123abcd.tmp").mkdir()
    for name in (
        "step-00000003.0123abcd.tmp/weights-00000-001.0123abcd.safetensors",
        "step-00000001/weights-00000-001.0123abcd.safetensors",
    ):
        (template / name).write_text("left over")
    folder = tmp_path / "lives"
    plan = Plan(str(folder), template=str(template), asynchronous=False, keep_last=1, rows=40)
    (lives,) = live({"every operation": plan}).values()
    whole = ["restored 2", "saving 3", "saved 3", THE_END]
    assert lives[-1] == whole
    assert died_saving(lives) > 15
    for i, said in enumerate(lives):
        assert said == whole[: len(said)]
        possible = {0: (2,), 1: (2,), 2: (2, 3)}.get(len(said), (3,))
        assert step_restored(folder / str(i)) in possible, i

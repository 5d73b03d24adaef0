"""SIGKILL at any moment: a run goes on from its last saved step, with exactly that step's numbers."""

from collections import Counter

import pytest

from tests.orchestrator.checkpoint.counted import saved, step_restored
from tests.orchestrator.checkpoint.lives import THE_END, Life, Plan, check, died_saving, live


def phases(lives: list[Life]) -> Counter[str]:
    """What was there of the checkpoint that was being saved."""

    def phase(life: Life) -> str:
        names = [name.split("/")[1] for name in life.left if ".tmp/" in name]
        if not names:
            return "no file"
        if any(name.startswith("manifest") for name in names):
            return "manifest"
        return " ".join(sorted({name.split(".")[0] for name in names}))

    return Counter(phase(life) for life in lives if died_saving(life))


AT_RANDOM = {
    "beside training": {"lives": 25},
    "in step": {"lives": 25, "asynchronous": False},
    "two ranks": {"lives": 6, "ranks": 2},
}


@pytest.fixture(scope="module")
def lived(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Life]]:
    folder = tmp_path_factory.mktemp("lives")
    return live({name: Plan(f"{folder}/{name}", **fields) for name, fields in AT_RANDOM.items()})


@pytest.mark.smoke
def test_a_few_kills(tmp_path):
    plans = {"one": Plan(f"{tmp_path}/one", lives=6), "two": Plan(f"{tmp_path}/two", lives=2, ranks=2)}
    for lives in live(plans).values():
        check(lives)


@pytest.mark.slow
@pytest.mark.parametrize("plan", AT_RANDOM)
def test_goes_on_from_what_was_saved(plan, lived):
    check(lived[plan])


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["beside training", "in step"])
def test_kills_were_inside_saves(plan, lived):
    lives = lived[plan]
    print(sum(map(died_saving, lives)), phases(lives))
    assert sum(map(died_saving, lives)) >= len(lives) * 2 / 3
    assert len(phases(lives)) >= 3


@pytest.mark.smoke
def test_around_every_operation(tmp_path):
    """Before and after each, and after each piece of a file; the removal of old checkpoints, and of what the
    life before left, are among them."""
    template = saved(tmp_path / "template", 1, 2)
    (template / "step-00000003.0123abcd.tmp").mkdir()
    for name in (
        "step-00000003.0123abcd.tmp/weights-00000.0123abcd.bin",
        "step-00000001/weights.0123abcd.json",
    ):
        (template / name).write_text("left over")
    folder = tmp_path / "lives"
    plan = Plan(str(folder), template=str(template), asynchronous=False, keep_last=1, rows=40)
    (lives,) = live({"every operation": plan}).values()
    assert lives[-1].said == ["restored 2", "saving 3", "saved 3", THE_END]
    for i, life in enumerate(lives):
        assert life.said == lives[-1].said[: len(life.said)]
        possible = {0: (2,), 1: (2,), 2: (2, 3)}.get(len(life.said), (3,))
        assert step_restored(folder / str(i)) in possible, i
    print(len(lives), phases(lives))
    assert phases(lives).keys() == {
        "no file",
        "weights-00000",
        "optimizer-00000 weights-00000",
        "optimizer-00000 weights weights-00000",
        "optimizer optimizer-00000 weights weights-00000",
        "manifest",
    }


@pytest.mark.slow
def test_the_rank_that_lives_on_ends_soon(lived):
    """It does not wait for the other one for ever."""
    print([round(life.alone_s, 2) for life in lived["two ranks"]])
    assert max(life.alone_s for life in lived["two ranks"]) < 20

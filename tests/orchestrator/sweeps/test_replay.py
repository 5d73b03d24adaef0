"""The spending that is expected of early stopping before a sweep begins."""

from orchestrator.sweeps.queue import TrialState
from orchestrator.sweeps.replay import expected_spending
from orchestrator.sweeps.stopping import EarlyStopping


def sweep(arms: int, decades: float, seeds: int = 1) -> list[TrialState]:
    return [
        TrialState(
            f"{i}/{s}", arm=i, cost=10 ** (decades * i / max(1, arms - 1)), steps=64, need={"CPU": 1.0}
        )
        for i in range(arms)
        for s in range(seeds)
    ]


def test_it_is_the_same_again_and_less_with_more_seeds():
    one, three = (expected_spending(lambda n=n: sweep(8, 2.0, n), EarlyStopping()) for n in (1, 3))
    assert three == expected_spending(lambda: sweep(8, 2.0, 3), EarlyStopping())
    assert three[1] < one[1]
    for low, middle, high in (one, three):
        assert 0 < low <= middle <= high <= 1


def test_a_single_arm_is_trained_whole():
    assert expected_spending(lambda: sweep(1, 0.0, seeds=3), EarlyStopping()) == (1.0, 1.0, 1.0)


def test_a_large_sweep_is_drawn_less_often(monkeypatch):
    drawn = []
    monkeypatch.setattr(
        "orchestrator.sweeps.replay._spending", lambda states, policy, seed: drawn.append(seed) or 0.5
    )
    expected_spending(lambda: sweep(1000, 2.0), EarlyStopping())
    assert drawn == [0, 1]

"""Stops an arm at half of its steps unless it is better there than every cheaper arm at its own half."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from moe import NonNegativeFloat
from orchestrator import Job, Policy, TrialState


@dataclass(frozen=True, kw_only=True)
class HalfwayConfig(Policy):
    """All arms in turn, from cheap to dear.

    Attributes:
        margin: by which an arm has to be better.
    """

    kind: Literal["halfway"] = "halfway"
    margin: NonNegativeFloat = 0.0

    def jobs(self, states: Sequence[TrialState]) -> Iterator[Job]:
        passed = self.passed_by(states)
        for state in sorted((each for each in states if each.waiting), key=lambda each: each.cost):
            if not state.reached:
                yield Job(state=state, until=_half(state))
            elif state.arm not in passed:
                yield Job(state=state, until=state.steps)

    def predictions(self, states: Sequence[TrialState]) -> Mapping[Hashable, float]:
        """An arm ends as good as it was halfway."""
        return {state.arm: state.reached[_half(state)] for state in states if _half(state) in state.reached}

    def passed_by(self, states: Sequence[TrialState]) -> Mapping[Hashable, tuple[float, float]]:
        """An arm adds what it is better by than the best cheaper arm, and needs half of its cost."""
        reached, total = self.predictions(states), sum(state.cost for state in states)
        passed, best = dict[Hashable, tuple[float, float]](), -1.0
        for state in sorted((each for each in states if each.arm in reached), key=lambda each: each.cost):
            gain = reached[state.arm] - best
            if gain <= self.margin and not state.finished:
                passed[state.arm] = max(gain, 0.0), 0.5 * state.cost / total
            best = max(best, reached[state.arm])
        return passed


def _half(state: TrialState) -> int:
    return max(1, state.steps // 2)

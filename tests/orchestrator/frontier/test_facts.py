"""What the page says of a point."""

from dataclasses import replace

from orchestrator.frontier.facts import columns, families, point_facts
from orchestrator.frontier.style import TIMES, UNKNOWN
from tests.orchestrator.frontier.samples import FRONTIER, LINK


def test_facts_of_a_point_with_seeds_and_a_second_cost() -> None:
    first = replace(
        FRONTIER.points[0],
        qualities=(0.7, 0.9),
        runs=(("seed-2", "javascript:alert(1)"), ("seed-3", f"{LINK}3")),
    )
    found = replace(FRONTIER, points=(first,), panels=("cost/device_s", "cost/unknown"), rest=())
    assert point_facts(found) == [
        {
            "arm": "dense-s",
            "family": "dense",
            "standing": "frontier, knee",
            "numbers": [2e10, 50, None, 0.8, 1],
            "texts": [f"2.00{TIMES}10¹⁰", "50", UNKNOWN, "0.8000", "1"],
            "facts": [
                ["k", "2"],
                ["affinity", "softmax"],
                ["family", "dense"],
                ["capacity", "2"],
                ["seeds", "2, from 0.7000 to 0.9000"],
            ],
            "runs": [
                ["dense-s-0123456789abcdef", f"{LINK}dense-s"],
                ["seed-2", None],
                ["seed-3", f"{LINK}3"],
            ],
        }
    ]
    kinds = [column["kind"] for column in columns(found)]
    assert kinds == ["arm", "family", *["number"] * 5, "status", "details", "runs"]


def test_only_present_families_are_named() -> None:
    assert list(families(FRONTIER)) == ["dense", "soft", "token_choice", "expert_choice", "hash"]

"""Titles, and units that a person reads."""

import pytest

from orchestrator.costs import FORWARD, PARAMS, TIMES
from orchestrator.output import UNKNOWN
from orchestrator.units import amount, axis_title, number, unit_of
from tests.orchestrator.frontier.samples import FLOPS, NAN, SECONDS


def test_numbers() -> None:
    values = (1.234e10, -2e-7, 9.999e9, 818.95, 43590.0, 0.0, 1.25, NAN)
    texts = (
        f"1.23{TIMES}10¹⁰",
        f"-2.00{TIMES}10⁻⁷",
        f"1.00{TIMES}10¹⁰",
        "819",
        "43590",
        "0",
        "1.25",
        UNKNOWN,
    )
    assert tuple(map(number, values)) == texts


@pytest.mark.parametrize(
    ("metric", "values", "title", "shown"),
    [
        (FORWARD, (2.5e-4, 0.004, NAN), f"Forward pass (kFLOP, 2 {TIMES} MAC)", (250, 4000)),
        (FORWARD, (0.25, 4.0), f"Forward pass (MFLOP, 2 {TIMES} MAC)", (250, 4000)),
        (FORWARD, (1e-9, 1e-30), f"Forward pass (FLOP, 2 {TIMES} MAC)", (1, 1e-21)),
        (FLOPS, (4.43e10, 1e12), f"Training (GFLOP, 6 {TIMES} MAC)", (44.3, 1000)),
        (FLOPS, (3e27,), f"Training (YFLOP, 6 {TIMES} MAC)", (3000,)),
        (FLOPS, (NAN, 0.0), f"Training (FLOP, 6 {TIMES} MAC)", ()),
        pytest.param(
            *("cost/train_flops_3mac", (2e18,), f"Training (EFLOP, 3 {TIMES} MAC)", (2,)),
            marks=pytest.mark.guests,
        ),
        (PARAMS, (2.5e5, 8e6), "Parameters (k)", (250, 8000)),
        (PARAMS, (12.0,), "Parameters", (12,)),
        (SECONDS, (2e5, 1e-5), "Device time (s)", (2e5, 1e-5)),
    ],
)
def test_values_have_the_unit_that_a_person_reads(
    metric: str, values: tuple[float, ...], title: str, shown: tuple[float, ...]
) -> None:
    """One for a column, by its smallest value; seconds and bytes have theirs by name."""
    unit = unit_of(metric, values)
    assert unit.title == title
    assert tuple(value / unit.size for value in values if value > 0) == pytest.approx(shown)


def test_a_single_amount() -> None:
    assert amount(FORWARD, 2.5e-4) == "250 kFLOP"
    assert amount("infer/ms", 0.25) == "0.25 ms"
    assert amount(PARAMS, 3e6) == "3 M"
    assert amount("val/acc1", 0.5) == "0.5"


def test_titles() -> None:
    assert axis_title("val/acc1") == "Validation accuracy @1"
    assert axis_title("val/recognised_parts") == "Validation recognised parts"
    assert axis_title("cost/price_usd") == "cost/price_usd"

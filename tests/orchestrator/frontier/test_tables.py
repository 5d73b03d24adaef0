"""Tables for papers: digits by the error, LaTeX's characters, the frontier in bold."""

from dataclasses import replace

import pytest

from orchestrator.frontier.frontier import Frontier
from orchestrator.frontier.points import Point
from orchestrator.frontier.tables import latex, with_error

ARM = Point(
    arm="w16_soft",
    family="soft",
    cost=4.43e10,
    quality=0.531,
    size=1.0,
    run_id="a",
    status="finished",
    qualities=(0.53, 0.532),
    runs=(("b", None),),
)


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (71.164, 1.21, r"$71.2 \pm 1.2$"),
        (53.10, 0.34, r"$53.1 \pm 0.3$"),
        (53.1, 24.0, r"$53.1 \pm 24.0$"),
        (53.123, 0.014, r"$53.123 \pm 0.014$"),
        (53.1, float("nan"), "53.1"),
        (float("nan"), 1.0, "--"),
    ],
)
def test_as_many_digits_as_the_error_leaves(value: float, error: float, text: str) -> None:
    assert with_error(value, error) == text


def test_a_tabular() -> None:
    other = replace(ARM, arm="dense", family="dense", cost=5e10, quality=0.4, qualities=())
    frontier = Frontier(
        name="s",
        cost_name="cost/train_flops_6mac",
        quality_name="val/acc1",
        points=(other, ARM),
        reference={"cost/train_flops_6mac": 1e12, "val/acc1": 0.1},
    )
    lines = latex(frontier).splitlines()
    assert lines[1:4] == [
        r"\begin{tabular}{lrr}",
        r"\toprule",
        r"arm & Validation accuracy @1 (\%) & Training FLOPs (6 $\times$ MAC) \\",
    ]
    assert lines[5] == r"\textbf{w16\_soft} & $53.10 \pm 0.10$ & $4.43 \cdot 10^{10}$ \\"
    assert lines[6] == r"dense & 40.0 & $5.00 \cdot 10^{10}$ \\"
    assert lines[7:] == [r"\bottomrule", r"\end{tabular}"]

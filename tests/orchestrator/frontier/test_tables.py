"""Tables for papers: digits by the error, LaTeX's characters, the frontier in bold."""

from dataclasses import replace

import pytest

from orchestrator.errors import UsageError
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
    costs={"infer/ms": 0.25},
    statistics={"moe/dropped_frac": 0.0123},
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
    other = replace(ARM, arm="dense", family="dense", cost=5e10, quality=0.4, qualities=(), statistics={})
    frontier = Frontier(
        name="s",
        cost_name="cost/train_flops_6mac",
        quality_name="val/acc1",
        points=(other, ARM),
        reference={"cost/train_flops_6mac": 1e12, "val/acc1": 0.1},
    )
    lines = latex(frontier).splitlines()
    assert lines[1:] == [
        r"\begin{tabular}{@{}lrr@{}}",
        r"\toprule",
        r" &  & Training \\",
        r" & Validation & (GFLOP, \\",
        r"Arm & accuracy @1 (\%) & 6~$\times$~MAC) \\",
        r"\midrule",
        r"\textbf{w16\_soft} & $53.10 \pm 0.10$ & 44.3 \\",
        r"dense & 40.0 & 50 \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]
    more = latex(replace(frontier, baselines={"linear": 0.3}), ["infer/ms", "moe/dropped_frac"]).splitlines()
    assert more[5:] == [
        r"Arm & accuracy @1 (\%) & 6~$\times$~MAC) & image (ms) & Dropped (\%) \\",
        r"\midrule",
        r"\textbf{w16\_soft} & $53.10 \pm 0.10$ & 44.3 & 0.25 & 1.2 \\",
        r"dense & 40.0 & 50 & 0.25 & -- \\",
        r"\midrule",
        r"linear & 30.0 & -- & -- & -- \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]
    timed = replace(ARM, spreads={"infer/ms": (0.24, 0.27)})
    *_, row, _, _ = latex(replace(frontier, points=(timed,)), ["infer/ms"]).splitlines()
    assert row == r"\textbf{w16\_soft} & $53.10 \pm 0.10$ & 44.3 & 0.25 (0.24--0.27) \\"
    with pytest.raises(
        UsageError, match=r"no column 'x'; known: cost/train_flops_6mac, infer/ms, moe/dropped"
    ):
        latex(frontier, ["x"])


def test_bits_have_their_error() -> None:
    """A likelihood of 1/4 is 2 bits; its error is divided by it and by ln 2, and the digits go by that."""
    name, qualities = "val/likelihood", (0.249, 0.251)
    arm = replace(ARM, quality=0.25, quality_name=name, qualities=qualities)
    reference = {"cost/train_flops_6mac": 1e12, name: 1 / 256}
    frontier = Frontier(
        name="s", cost_name="cost/train_flops_6mac", quality_name=name, points=(arm,), reference=reference
    )
    text = latex(frontier)
    assert r"& $2.000 \pm 0.006$ &" in text
    assert "accuracy" not in text
    assert r"\%" not in text


def test_a_baseline_has_the_error_of_its_images() -> None:
    frontier = Frontier(
        name="s",
        cost_name="cost/train_flops_6mac",
        quality_name="val/acc1",
        points=(replace(ARM, images=367),),
        reference={"cost/train_flops_6mac": 1e12, "val/acc1": 0.1},
        baselines={"linear": 0.3},
    )
    assert r"linear & $30.0 \pm 2.4$ & -- \\" in latex(frontier)

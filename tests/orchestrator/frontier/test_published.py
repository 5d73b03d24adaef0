"""The papers' points in our metrics."""

import pytest

from orchestrator.frontier.published import Published, published


def named(points: tuple[Published, ...], model: str) -> Published:
    return next(point for point in points if point.model == model)


def test_training_flops_have_one_convention() -> None:
    """Soft MoE, table 1, prints 1769.5 exaFLOP at 3 per multiply-add; V-MoE, table 2, 4.27k at 6."""
    quality = "imagenet/acc_10shot"
    three, six = published(quality, "cost/train_flops_3mac"), published(quality, "cost/train_flops_6mac")
    assert named(three, "Soft MoE B/16 128E 9M steps").cost == pytest.approx(1769.5e18)
    assert named(six, "Soft MoE B/16 128E 9M steps").cost == pytest.approx(2 * 1769.5e18)
    assert named(six, "ViT-H/14").cost == pytest.approx(4270e18)
    assert named(three, "ViT-H/14").cost == pytest.approx(4270e18 / 2)
    assert len(three) == len(six) == 13


def test_days_are_of_chips() -> None:
    """V-MoE prints 2.38k core-days for ViT-H/14; the other two papers print days of chips."""
    days = published("imagenet/acc_10shot", "cost/tpuv3_days")
    assert named(days, "ViT-H/14").cost == 1190
    assert named(days, "ViT S/16 4M steps").cost == 153.5
    assert len(days) == 8 + 34 + 5


def test_qualities_are_fractions_and_jft_is_two_metrics() -> None:
    small = named(published("jft300m/prec1", "cost/tpuv3_days"), "B/32 soft c=1")
    assert (small.cost, small.quality, small.family) == (36.95, 0.4523, "soft")
    assert small.source.startswith("Routers in Vision MoE")
    assert len(published("jft300m/prec1", "cost/tpuv3_days")) == 34 + 4  # V-MoE-15B has none
    assert len(published("jft4b/prec1", "cost/forward_gflops_2mac")) == 8
    assert len(published("imagenet/acc1", "cost/train_flops_6mac")) == 13


@pytest.mark.parametrize("names", [("val/acc1", "cost/tpuv3_days"), ("imagenet/acc1", "cost/device_s")])
def test_other_metrics_have_no_published_points(names: tuple[str, str]) -> None:
    assert published(*names) == ()

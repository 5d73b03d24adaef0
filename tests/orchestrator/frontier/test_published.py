"""Which of our metrics are those that papers print, and the error for an unknown published figure."""

import pytest

from orchestrator.errors import UsageError
from orchestrator.frontier.published import DRAWABLE, papers_metric, published_frontier


def test_an_unknown_figure_is_refused_with_those_known() -> None:
    with pytest.raises(UsageError, match=f"no published figure 'figure3'; known: {', '.join(DRAWABLE)}"):
        published_frontier("figure3")


@pytest.mark.parametrize(
    ("quality", "data", "classes", "metric"),
    [
        ("fewshot/acc_10shot", "s3://bucket/imagenet/", None, "imagenet/acc_10shot"),
        ("fewshot/acc_5shot", "/data/ImageNet-1k", 1000, "imagenet/acc_5shot"),
        ("fewshot/acc_10shot", "/data/imagenet", 100, None),
        ("fewshot/acc_10shot", "/data/imagenet-100", None, None),
        ("fewshot/acc_25shot", "/data/imagenet", None, None),
        ("val/acc1", "/data/imagenet", 1000, None),  # the papers fine-tune
    ],
)
def test_a_metric_is_the_papers_on_imagenet_alone(
    quality: str, data: str, classes: int | None, metric: str | None
) -> None:
    assert papers_metric(quality, data, classes) == metric

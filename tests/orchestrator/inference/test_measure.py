"""What is known of a measurement before it is made."""

import math

import pytest

from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.errors import UsageError
from orchestrator.inference.measure import Setting, estimated_s

RUN = RunConfig(name="a", storage="/tmp/none")


def test_small_models_are_measured_by_default_and_large_ones_are_not() -> None:
    """36 as those of the quickstart take two minutes on two processors; one of S/16's size takes twenty."""
    assert 45 < estimated_s([RUN] * 12) < 150
    small = {"model.image_size": 224, "model.patch_size": 16, "model.width": 384, "model.depth": 12}
    large = override(RUN, small | {"model.heads": 6, "model.mlp_dim": 1536})
    assert 900 < estimated_s([large]) < 3000
    assert estimated_s([large] * 1000) == math.inf, "their weights fill the memory"
    assert estimated_s([]) == math.inf


def test_settings_in_words() -> None:
    assert str(Setting()) == "one image, onnxruntime, 1 thread"
    assert str(Setting(runtime="torch", batch=8, threads=4)) == "8 images, torch, 4 threads"
    with pytest.raises(UsageError, match="`threads` must be at least 1, got 0"):
        Setting(threads=0)

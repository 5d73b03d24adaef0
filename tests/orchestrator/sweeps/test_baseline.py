"""The linear classifier beside a sweep: scikit-learn's own on the same images; none for large data sets."""

from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.data.manifest import open_manifest
from orchestrator.data.shards import DataSet
from orchestrator.sweeps import baseline
from orchestrator.sweeps.baseline import NAME, linear_baseline


def keys(path: str, split: Any) -> list[int]:
    """The numbers of the digits in a split."""
    data = DataSet(path=path, manifest=open_manifest(path), cache_bytes=0)
    shards = range(len(data.manifest.splits[split]))
    return [int(key.removeprefix("digit-")) for shard in shards for key in data.keys(split, shard)]


def test_it_is_logistic_regression_on_the_digits(digits: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = override(RunConfig(), {"data.path": digits, "model.image_size": 8, "data.augment": "shift"})
    found = linear_baseline(run)
    bundled: Any = load_digits()
    train, val = (keys(digits, split) for split in ("train", "val"))
    pixels = (bundled.data * (255 / 16)).round() / 255
    model = LogisticRegression(max_iter=100).fit(pixels[train], bundled.target[train])
    right = np.sum(model.predict(pixels[val]) == bundled.target[val])
    assert found[NAME] == pytest.approx(right / len(val), abs=2.1 / len(val))
    assert found[NAME] > 0.9
    monkeypatch.setattr(baseline, "MOST_PRODUCTS", 1000)
    assert linear_baseline(run) == {}

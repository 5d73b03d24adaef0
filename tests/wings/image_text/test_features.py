"""Features of a frozen tower: stored once, they give the steps that computing them gives."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.data.stream import in_process, open_stream
from orchestrator.data.text import captions_as_field, read_tokenizer, save_tokenizer
from orchestrator.errors import UsageError
from orchestrator.packing import open_source
from orchestrator.packing.pack import write_shards
from orchestrator.runs.metrics_file import Metrics
from orchestrator.runs.run_directory import RunDir
from orchestrator.sweeps.catalog import make_sweep
from orchestrator.training import features
from orchestrator.training.features import can_be_stored
from orchestrator.training.fit import check_start, decided_by_data
from orchestrator.training.worker import train_worker
from wings.image_text.two_towers import TwoTowersConfig

ROWS = 256  # of a file, so that there are several


class UnpluggedError(Exception):
    pass


@pytest.fixture(scope="module")
def classifier(captioned: str, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """The run of a classifier with Soft MoE, after four steps."""
    small = {"model.width": 16, "model.mlp_dim": 32, "model.moe.router.kind": "soft", "train.steps": 4}
    place = {"data.path": captioned, "storage": str(tmp_path_factory.mktemp("towers")), "name": "classes"}
    run = override(RunConfig(), small | place)
    train_worker(run, report=lambda step, values: None, read=in_process)
    return run


@pytest.fixture
def lit(classifier: RunConfig, tmp_path: Path) -> RunConfig:
    base = make_sweep("lit", "tiny").base
    assert isinstance(base.model, TwoTowersConfig)
    changes = {
        "storage": str(tmp_path),
        "data.path": classifier.data.path,
        "train.init_from": RunDir.of(classifier).checkpoints,
        "train.steps": 6,
        "train.report_every": 1,
        "train.eval_every": 3,
        "checkpoint.every": 2,
        "checkpoint.asynchronous": False,
    }
    return decided_by_data(
        override(replace(base, model=replace(base.model, image=classifier.model)), changes)
    )


def trained(run: RunConfig, stop_at: int | None = None) -> dict[int, Metrics]:
    """Returns step -> report, up to a crash in the report of step `stop_at`."""
    found = {}

    def report(step: int, values: Metrics) -> None:
        if step == stop_at:
            raise UnpluggedError
        found[step] = values

    train_worker(run, report=report, read=in_process)
    return found


def compared(values: Metrics) -> Metrics:
    return {n: v for n, v in values.items() if n.startswith(("train/", "val/")) and n != "train/lr"}


def counted(monkeypatch: pytest.MonkeyPatch, *, break_at: int | None = None) -> list[int]:
    """Returns a list that grows by the number of images whose features are computed, file by file."""
    monkeypatch.setattr(features, "ROWS", ROWS)
    found, compute = list[int](), features.frozen_features

    def counting(model: Any, stream: Any, device: Any) -> Any:
        if len(found) == break_at:
            raise UnpluggedError
        found.append(stream.epoch())
        return compute(model, stream, device)

    monkeypatch.setattr(features, "frozen_features", counting)
    return found


def test_stored_features_train_as_the_tower_does(lit: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "ROWS", ROWS)
    stored = trained(lit)
    with patch.object(features, "can_be_stored", lambda run: False):
        computed = trained(replace(lit, name="computed"))
    for step, values in computed.items():
        assert compared(stored[step]) == pytest.approx(compared(values), rel=1e-5), step
    assert stored[6]["val/zero_shot_acc1"] == pytest.approx(computed[6]["val/zero_shot_acc1"])
    assert stored[6]["data/fingerprint"] == computed[6]["data/fingerprint"]


@pytest.mark.smoke
def test_an_interruption_computes_nothing_twice(lit: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        first = counted(patched, break_at=3)
        with pytest.raises(UnpluggedError):
            trained(lit)
    with monkeypatch.context() as patched:
        second = counted(patched)
        with pytest.raises(UnpluggedError):
            trained(lit, stop_at=5)
    assert (len(first), sum(first) + sum(second)) == (3, 1430 + 367)
    with monkeypatch.context() as patched:
        third = counted(patched)
        resumed = trained(lit)
        again = trained(replace(lit, name="again"))
    assert third == []  # another run of the same tower finds them too
    for step, values in resumed.items():
        assert compared(values) == compared(again[step])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, True),
        ({"train.freeze": ("image.", "text.")}, True),
        ({"train.freeze": ("im",)}, True),
        ({"train.freeze": ("image.blocks.",)}, False),
        ({"train.freeze": ()}, False),
        ({"data.augment": "flip"}, False),
        ({"data.augment": "randaugment"}, False),
        ({"model.image.moe.images_per_group": 2}, False),
    ],
)
def test_when_they_can_be_stored(lit: RunConfig, changes: dict[str, Any], says: bool) -> None:
    assert can_be_stored(override(lit, changes)) is says


def test_other_images_weights_and_precision_have_others(
    lit: RunConfig, classifier: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = counted(monkeypatch)
    trained(lit)
    whole = len(counts)
    for name, changes in {
        "square": {"data.eval_crop": 1.0},
        "seeded": {"train.init_without": "image.blocks.0"},
        "narrow": {"train.compute_dtype": "bfloat16"},
    }.items():
        trained(override(replace(lit, name=name), changes))
    assert len(counts) == 4 * whole


def test_other_buffers_have_others(lit: RunConfig) -> None:
    """As the planes of a hash, or running statistics."""
    stream = replace(open_stream(lit, "val", 0, 1), plan=None, fields={})
    changes = {"model.image.moe": {"num_experts": 4, "router": {"kind": "hash", "by": "content"}}}
    model = override(lit, changes).model.build(seed=0)
    before = features._key(model, stream)
    next(buffer for name, buffer in model.named_buffers() if name.endswith("planes")).neg_()
    assert features._key(model, stream) != before


def test_a_bad_image_has_none(lit: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source("digits")
    caption = {"text": captions_as_field("a digit")}
    splits = {
        split: [
            sample._replace(fields=caption, image=b"\xff\xd8\xffbroken" if i == 5 else sample.image)
            for i, sample in enumerate(samples[:200])
        ]
        for split, samples in source.splits.items()
    }
    path = str(tmp_path / "broken")
    write_shards(path, source.classes, splits)
    save_tokenizer(path, read_tokenizer(lit.data.path))
    reports = trained(override(lit, {"data.path": path, "train.steps": 8, "data.max_bad_frac": 0.5}))
    assert reports[8]["data/bad_images"] >= 1
    assert all(np.isfinite(v) for n, v in reports[8].items() if n.startswith(("train/", "val/")))


def test_random_weights_are_not_frozen(lit: RunConfig) -> None:
    check_start(lit)
    with pytest.raises(UsageError, match=r"train.freeze=\['image.'\] would keep random weights"):
        check_start(override(lit, {"train.init_from": None}))


def test_data_decide_vocabulary_and_classes(lit: RunConfig, captioned: str) -> None:
    assert isinstance(lit.model, TwoTowersConfig)
    assert lit.model.text.vocabulary == read_tokenizer(captioned).size()
    assert lit.task.quality == "val/zero_shot_acc1"
    assert decided_by_data(lit) == lit

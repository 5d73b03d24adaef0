"""Fields beside image and label: packed, found in place, read by workers, and asked for by a task."""

import json
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.data.batch import Batch, concatenated
from orchestrator.data.fields import BytesField
from orchestrator.data.images import encode_png
from orchestrator.data.index import RECORD, record_type
from orchestrator.data.manifest import check_shards, open_manifest
from orchestrator.data.stream import in_process, open_stream
from orchestrator.errors import UsageError
from orchestrator.packing import pack as packing
from orchestrator.packing.pack import Sample, write_shards
from orchestrator.runs.run_directory import RunDir
from orchestrator.training.worker import train_worker

ROWS = 40


def sample(number: int, **fields: bytes | float) -> Sample:
    grey = np.full((8, 8, 3), 6 * number, np.uint8)
    own = {"brightness": 6 * number / 255, "text": f"grey {number}".encode(), **fields}
    return Sample(encode_png(grey), number % 3, f"grey-{number}", fields=own)


@pytest.fixture(autouse=True, scope="module")
def _task() -> None:
    """Its kind joins the tasks: not at import, since laws are collected over all kinds."""
    import_module("tests.own.brightness")


@pytest.fixture
def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(packing, "ROWS_PER_SHARD", 9)
    path = str(tmp_path / "greys")
    splits = {"train": map(sample, range(ROWS)), "val": map(sample, range(ROWS - 5, ROWS))}
    write_shards(path, "abc", splits)
    return path


def run_of(path: str, **changes) -> RunConfig:
    small = {"data.path": path, "data.batch_size": 8, "data.lanes": 4, "task.kind": "brightness"}
    return override(RunConfig(), small | {"train.steps": 30, "train.lr": 0.01} | changes)


def check(batch: Batch) -> None:
    for i in range(len(batch)):
        number = int(batch["image"][i, 0, 0, 0]) // 6
        expected = f"grey {number}".encode()[:6].ljust(6, b"\0") if batch.valid[i] else bytes(6)
        assert bytes(batch["text"][i].tolist()) == expected
        assert batch["brightness"][i].item() == 6 * number / 255


def test_every_slot_has_the_fields_of_its_image(packed: str) -> None:
    """On any number of workers; the last images of validation are padding."""
    assert open_manifest(packed).fields == {"brightness": "number", "text": "bytes"}
    check_shards(packed, open_manifest(packed), verify=True)
    run = run_of(packed)
    whole = list(in_process(open_stream(run, "train", 0, 1), range(6)))
    halves = [in_process(open_stream(run, "train", rank, 2), range(6)) for rank in range(2)]
    for batch, *parts in zip(whole, *halves, strict=True):
        check(batch)
        for mine, theirs in zip(batch.tensors(), concatenated(parts).tensors(), strict=True):
            assert (mine == theirs).all()
    val = open_stream(run, "val", 0, 1)
    for batch in in_process(val, val.steps()):
        check(batch)


def test_a_task_trains_on_a_number(packed: str, tmp_path: Path) -> None:
    run = run_of(packed, storage=str(tmp_path), name="greys")
    train_worker(run, report=lambda step, metrics: None, read=in_process)
    result = RunDir(str(tmp_path / "greys")).result()
    assert result
    assert result.metrics["train/loss_brightness"] < 0.05
    assert 0 <= result.metrics["val/within"] <= 1


def test_what_the_data_lack_is_named(digits: str, packed: str) -> None:
    with pytest.raises(UsageError, match=r"has no field 'brightness' of number, but image, label: pack it"):
        open_stream(run_of(digits), "train", 0, 1)
    manifest = json.loads(Path(packed, "manifest.json").read_text())
    manifest["fields"]["brightness"] = "bytes"
    Path(packed, "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UsageError, match=r"has no field 'brightness' of number, but .*brightness \(bytes\)"):
        open_stream(run_of(packed, **{"data.shuffle_window": 2}), "val", 0, 1)


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        (sample(1)._replace(fields={}), r"grey-1 has the fields \{\}, other samples have"),
        (sample(1, text=1.0), r"'text': 'number'\}, other samples have"),
    ],
)
def test_samples_have_the_same_fields(odd: Sample, said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=said):
        write_shards(str(tmp_path), "abc", {"train": [sample(0), odd], "val": [sample(2)]})


@pytest.mark.parametrize("name", ["label", "offset", "a b", "mix"])
def test_names_that_are_taken(name: str, tmp_path: Path) -> None:
    taken = [sample(n, **{name: 1.0}) for n in range(2)]
    with pytest.raises(UsageError, match=f"a field cannot be called {name!r}"):
        write_shards(str(tmp_path), "abc", {"train": taken, "val": taken})


def test_data_sets_without_further_fields_are_as_before(tmp_path: Path) -> None:
    plain = [sample(n)._replace(fields={}) for n in range(4)]
    manifest = write_shards(str(tmp_path), "abc", {"train": plain, "val": plain})
    assert "fields" not in json.loads((tmp_path / "manifest.json").read_text())
    assert record_type(1, manifest.fields) == RECORD
    assert (tmp_path / "train.index").stat().st_size == 4 * RECORD.itemsize


def test_bytes_have_one_length() -> None:
    field = BytesField(length=3)
    assert [field.decode(text).tolist() for text in (b"", b"ab", b"abcd")] == [
        [0, 0, 0],
        [97, 98, 0],
        [97, 98, 99],
    ]
    assert field.empty(2).shape == (2, 3)

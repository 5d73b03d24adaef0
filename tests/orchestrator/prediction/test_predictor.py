"""A part, without Ray: what is written is what the model says."""

import io
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from moe.overrides import RoutingOverrides
from orchestrator import storage
from orchestrator.data.images import decode, normalize
from orchestrator.errors import UsageError
from orchestrator.prediction.inputs import open_inputs
from orchestrator.prediction.plan import file_of
from orchestrator.prediction.predictor import SCHEMA, Predictor, Settings
from tests.orchestrator.prediction.models import exported
from tests.parts import png

GROUPS = {
    "model.moe.router.kind": "token_choice",
    "model.moe.router.k": 2,
    "model.moe.router.capacity_factor": 0.5,
    "model.moe.images_per_group": 4,
    "model.moe.num_experts": 4,
}


@pytest.fixture
def settings(tmp_path):
    """``settings(changes of the model, field=..)``."""

    def make(changes=None, **fields) -> Settings:
        given = Settings(
            model=exported(tmp_path / "model.safetensors", changes),
            point=RoutingOverrides(),
            out=str(tmp_path / "out"),
            batch_size=4,
            threads=2,
            classes=None,
        )
        return replace(given, **fields)

    return make


@pytest.fixture
def folder(tmp_path):
    """Ten images; the third and the sixth are no images, the last is cut short."""
    (tmp_path / "images").mkdir()
    for n in range(10):
        pixels = np.random.default_rng(n).integers(0, 256, (8, 8, 3))
        (tmp_path / f"images/{n}.png").write_bytes(png(pixels))
    (tmp_path / "images/2.png").write_bytes(b"nonsense")
    (tmp_path / "images/5.png").write_bytes(b"")
    (tmp_path / "images/9.png").write_bytes((tmp_path / "images/9.png").read_bytes()[:-40])
    return tmp_path / "images"


def written(settings: Settings, part: int = 0):
    return pq.read_table(io.BytesIO(storage.read_bytes(storage.join(settings.out, file_of(part)))))


@pytest.mark.parametrize("changes", [None, GROUPS], ids=["soft", "groups of 4"])
@pytest.mark.parametrize("batch_size", [4, 8, 100])
def test_what_the_model_says(changes, batch_size, settings, folder):
    """Against one forward pass of all images, in which the bad ones are padding: in groups that compete for
    room a bad image must take none, and the size of a batch must not matter.
    """
    given = settings(changes, batch_size=batch_size)
    (part,) = open_inputs(str(folder), None, cache_bytes=0).parts(100)
    assert Predictor(given).do(3, part) == (3, 10, 3)
    table = written(given, 3)
    assert table.schema.equals(SCHEMA)
    assert table["key"].to_pylist() == [f"{n}.png" for n in range(10)]

    bad = {2, 5, 9}
    images, valid = torch.zeros(10, 3, 8, 8, dtype=torch.uint8), torch.ones(10)
    for n in range(10):
        if n in bad:
            valid[n] = 0
        else:
            images[n] = decode((folder / f"{n}.png").read_bytes())
    with torch.inference_mode():
        best = given.model.load()(normalize(images), valid).logits.softmax(-1).topk(5)
    for n, row in enumerate(table.to_pylist()):
        if n in bad:
            assert row["top5_index"] is row["top5_class"] is row["top5_prob"] is None
            assert row["error"]
        else:
            assert row["error"] is None
            assert row["top5_index"] == best.indices[n].tolist()
            assert row["top5_class"] == [str(i) for i in row["top5_index"]]
            np.testing.assert_allclose(row["top5_prob"], best.values[n], rtol=1e-5)
    assert table["error"][2].as_py().startswith("not an image of a known format")


def test_names_of_classes_and_few_of_them(settings, folder):
    given = settings({"model.num_classes": 3, "model.width": 16}, classes=("ant", "bee", "cat"))
    (part,) = open_inputs(str(folder), None, cache_bytes=0).parts(100)
    Predictor(given).do(0, part)
    row = written(given).to_pylist()[0]
    assert sorted(row["top5_class"]) == ["ant", "bee", "cat"]
    assert row["top5_class"] == [("ant", "bee", "cat")[i] for i in row["top5_index"]]
    assert sum(row["top5_prob"]) == pytest.approx(1)


def test_an_operating_point(settings, folder):
    (part,) = open_inputs(str(folder), None, cache_bytes=0).parts(100)
    as_trained = settings(GROUPS)
    Predictor(as_trained).do(0, part)
    before = written(as_trained)["top5_prob"].to_pylist()
    Predictor(replace(as_trained, point=RoutingOverrides(k=1))).do(0, part)
    assert written(as_trained)["top5_prob"].to_pylist() != before
    with pytest.raises(UsageError, match="k=9 exceeds num_experts=4"):
        Predictor(replace(as_trained, point=RoutingOverrides(k=9))).do(0, part)


def test_the_crop_of_the_models_run(settings, tmp_path):
    """Twice as large as the model's input: of the whole image (crop 1) or of its middle half."""
    (tmp_path / "one").mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (16, 16, 3))
    (tmp_path / "one/0.png").write_bytes(png(pixels))
    (part,) = open_inputs(str(tmp_path / "one"), None, cache_bytes=0).parts(1)
    given = settings({"model.width": 16, "data.eval_crop": 0.5})
    Predictor(given).do(0, part)
    middle = torch.from_numpy(pixels[4:12, 4:12].astype("uint8")).permute(2, 0, 1)[None]
    expected = given.model.load()(normalize(middle)).logits.softmax(-1).max().item()
    assert written(given)["top5_prob"][0][0].as_py() == pytest.approx(expected, rel=1e-5)


def test_shards_and_results_on_s3(bucket, settings, pack_greys):
    path, _ = pack_greys(train=4, val=3)
    for name in storage.files(path):
        storage.write_bytes(bucket.uri("shards", name), storage.read_bytes(storage.join(path, name)))
    given = settings(out=bucket.uri("out"))
    predictor = Predictor(given)
    for number, part in enumerate(open_inputs(bucket.uri("shards"), None, cache_bytes=10**9).parts(4)):
        predictor.do(number, part)
    keys = [row["key"] for number in range(2) for row in written(given, number).to_pylist()]
    assert keys == [f"grey-{n}" for n in range(7)]


def test_a_write_that_fails_leaves_no_file(bucket, settings, folder):
    given = settings(out=bucket.uri("out"))
    (part,) = open_inputs(str(folder), None, cache_bytes=0).parts(100)
    predictor = Predictor(given)
    with bucket.failing("busy"), pytest.raises(OSError, match="out/part-000000"):
        predictor.do(0, part)
    assert bucket.all_keys() == []

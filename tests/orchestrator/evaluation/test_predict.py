"""Predictions without Ray: which images there are, what the model says of them, and what is kept."""

import io
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from threading import Semaphore
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from torchvision.transforms.v2.functional import resize

from moe.codec import to_dict
from moe.models.vit import ViT
from moe.overrides import AS_TRAINED, RoutingOverrides
from moe.routers import RouterConfig
from orchestrator import storage
from orchestrator.checkpoint.models import ModelRef
from orchestrator.checkpoint.weights import signature_of
from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.data.batch import normalize
from orchestrator.data.images import BadImage, Transform, decode
from orchestrator.data.preparation import Preparation
from orchestrator.errors import UsageError
from orchestrator.evaluation.predict import (
    PLAN,
    SCHEMA,
    Predictor,
    begin,
    file_of,
    list_parts,
    part_size,
    pool_size,
    predict_in_pool,
    predict_together,
    write_parts,
)
from orchestrator.evaluation.sharded import Sharding
from tests.moe.parts import each_model, vit_config
from tests.orchestrator.buckets import Bucket
from tests.orchestrator.evaluation.exported import exported
from tests.parts import png

GROUPS = {
    "model.moe.router.kind": "token_choice",
    "model.moe.router.k": 2,
    "model.moe.router.capacity_factor": 0.5,
    "model.moe.images_per_group": 4,
    "model.moe.num_experts": 4,
}


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """Ten images and other files. The third and the sixth are not images, the last is cut short."""
    (tmp_path / "images/.git").mkdir(parents=True)
    for n in range(10):
        pixels = np.random.default_rng(n).integers(0, 256, (8, 8, 3))
        (tmp_path / f"images/{n}.png").write_bytes(png(pixels))
    (tmp_path / "images/2.png").write_bytes(b"nonsense")
    (tmp_path / "images/5.png").write_bytes(b"")
    (tmp_path / "images/9.png").write_bytes((tmp_path / "images/9.png").read_bytes()[:-40])
    for name in ("notes.txt", ".hidden.png", ".git/x.png"):
        (tmp_path / "images" / name).write_bytes(b"text")
    return str(tmp_path / "images")


def predictor(model: ModelRef, images: str, **settings: Any) -> Predictor:
    given = {
        "point": RoutingOverrides(),
        "batch_size": 4,
        "classes": None,
        "preparation": Preparation(),
        **settings,
    }
    return Predictor(model=model, images=images, **given)


def test_transparent_images_can_be_put_on_a_background(tmp_path: Path) -> None:
    """A white image whose pixels are all transparent, above black, is white only with a background."""
    content = io.BytesIO()
    Image.new("RGBA", (8, 8), (0, 0, 0, 0)).save(content, "PNG")
    for background, value in ((None, 0), ("white", 255)):
        made = Predictor.__new__(Predictor)
        made.preparation, made.decoding = Preparation(background=background), Semaphore(1)
        made.transform = Transform(size=8)
        pixels = made._decoded(content.getvalue)
        assert isinstance(pixels, torch.Tensor)
        assert pixels.unique().tolist() == [value]
        bad = made._decoded(lambda: b"nonsense")
        assert isinstance(bad, BadImage)
        assert "not an image of a known format" in str(bad)


@pytest.mark.parametrize("error", [FileNotFoundError("no such file"), PermissionError("permission denied")])
def test_a_file_that_may_not_be_read_is_a_bad_image(error: OSError) -> None:
    def read() -> bytes:
        raise error

    bad = Predictor.__new__(Predictor)._decoded(read)
    assert (type(bad), str(bad)) == (BadImage, str(error))


def test_images_are_prepared_as_those_that_the_model_learned_from(tmp_path: Path) -> None:
    """Unless it is said how."""
    model = exported(tmp_path / "model.safetensors")
    model = replace(model, signature=replace(model.signature, background="white"))
    made = predictor(model, "", preparation=None), predictor(model, "")
    assert [each.preparation.background for each in made] == ["white", None]


def rows_of(predictor: Predictor, split: str | None = None) -> list[dict[str, Any]]:
    _, parts = list_parts(predictor.images, split, group=1)
    return predictor(pa.Table.from_pylist(parts)).to_pylist()


@pytest.mark.parametrize(
    ("count", "group", "size"),
    [
        (1, 1, 64),
        (10_000, 1, 64),  # 157 parts
        (1_281_167, 1, 4096),  # 313 parts: 1,281,167 / 256 = 5004 would be too much to lose
        (256 * 100, 8, 96),  # whole groups
        (10, 1000, 1000),
    ],
)
def test_size_of_parts(count: int, group: int, size: int):
    assert part_size(count, group) == size


def test_files_below_a_folder(folder: str, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, logger="orchestrator"):
        digest, (part,) = list_parts(folder, None, group=1)
    assert part["names"] == [f"{n}.png" for n in range(10)]
    assert "1 files are left out, because their names are not those of images: notes.txt" in caplog.text
    Path(folder, "notes.txt").write_bytes(b"other text")
    assert list_parts(folder, None, group=1)[0] == digest, "covers names and sizes of images alone"
    Path(folder, "1.png").write_bytes(b"another size")
    assert list_parts(folder, None, group=1)[0] != digest
    Path(folder, "8.png").rename(f"{folder}/x.png")
    assert list_parts(folder, None, group=1)[1][0]["names"][-2:] == ["9.png", "x.png"]


@pytest.mark.parametrize(("group", "rows_per_shard"), [(1, 4), (48, 4), (1, 30)])
def test_rows_of_shards(
    group: int,
    rows_per_shard: int,
    pack_greys: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """100 and 70 images: parts cut across shards, and shards of 30 in their middle, never across splits, in
    whole groups. Seven images of a shard are read at a time, and each part has a file.
    """
    monkeypatch.setattr("orchestrator.evaluation.predict.READ_TOGETHER", 7)
    path, manifest = pack_greys(train=100, val=70, rows_per_shard=rows_per_shard)
    digest, parts = list_parts(path, None, group=group)
    assert digest == manifest.digest()
    assert parts[0]["stop"] - parts[0]["first"] == (64 if group == 1 else 48)
    predict_rows = predictor(exported(tmp_path / "model.safetensors"), path, batch_size=48)
    table = predict_rows(pa.Table.from_pylist(parts))
    rows = table.to_pylist()
    assert [row["key"] for row in rows] == [f"grey-{n}" for n in range(170)]
    assert len([*write_parts(str(tmp_path / "out"), [table])]) == len(parts)
    files = [pq.read_table(tmp_path / "out" / file_of(part["number"])).to_pylist() for part in parts]
    assert [len(file) for file in files] == [part["stop"] - part["first"] for part in parts]
    assert [row["key"] for file in files for row in file] == [row["key"] for row in rows]
    numbers = [row["part"] for row in rows]
    assert numbers == sorted(numbers)
    assert set(numbers) == {part["number"] for part in parts}
    assert [row["key"] for row in rows_of(predict_rows, "val")] == [f"grey-{n}" for n in range(100, 170)]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_workers_that_share_a_model_make_equal_passes(
    ranks: int, pack_greys: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """64, 36 and 30 images, in batches of 48: each pass exchanges a whole batch, and a worker with a smaller
    part or none makes as many passes as the others. All images are predicted once."""
    path, _ = pack_greys(train=100, val=30)
    model = exported(tmp_path / "model.safetensors")
    _, parts = list_parts(path, None, group=1)
    assert [part["stop"] - part["first"] for part in parts] == [64, 36, 30]
    settings: Any = {
        "point": RoutingOverrides(),
        "images": path,
        "classes": None,
        "preparation": Preparation(),
    }
    passes: list[list[int]] = [[] for _ in range(ranks)]
    tables: list[pa.Table] = []

    class InTurn(Sharding):
        def answers(self, model: ModelRef, function: Any, *, batch_size: int) -> Any:
            assert batch_size == 48 * ranks
            for rank in range(ranks):
                monkeypatch.setattr(
                    "orchestrator.evaluation.predict.this_rank", lambda rank=rank: (rank, ranks)
                )
                loaded = model.load()
                loaded.register_forward_pre_hook(
                    lambda _, inputs, rank=rank: passes[rank].append(len(inputs[0]))
                )
                function(loaded, tables.append)
            return iter(tables)

    found = predict_together(parts, InTurn(workers=ranks, root=""), model, batch_size=48, **settings)
    rows = {row["key"]: row for table in found for row in table.to_pylist()}
    assert passes == [[48] * 2 * (2 if ranks == 2 else 1)] * ranks
    alone = Predictor(model=model, batch_size=48, **settings)
    wanted = {row["key"]: row for part in parts for row in alone.table(part).to_pylist()}
    assert len(wanted) == 130 == sum(map(len, tables))
    for key, row in wanted.items():
        assert (rows[key]["part"], rows[key]["top5_index"]) == (row["part"], row["top5_index"])
        assert rows[key]["top5_prob"] == pytest.approx(row["top5_prob"], rel=1e-5)


def test_where_there_are_no_images(tmp_path: Path):
    (tmp_path / "tars").mkdir()
    (tmp_path / "tars/0.tar").write_bytes(b"")
    for place, split, message in [
        ("nothing", None, "no folder .*nothing"),
        ("tars", None, r"no images below .*tars, but 1 other files, such as 0\.tar; shards need a manifest"),
        ("tars", "val", r"`split` val: .*tars has no manifest\.json"),
    ]:
        with pytest.raises(UsageError, match=message):
            list_parts(str(tmp_path / place), split, group=1)


@pytest.mark.parametrize(("changes", "batch_size"), [(None, 100), (GROUPS, 4), (GROUPS, 100)])
def test_what_the_model_says(changes: dict[str, Any] | None, batch_size: int, folder: str, tmp_path: Path):
    """Against one forward pass of all images, in which the bad images are padding: in groups that compete for
    capacity a bad image takes none, and the size of a batch does not matter.
    """
    model = exported(tmp_path / "model.safetensors", changes)
    rows = rows_of(predictor(model, folder, batch_size=batch_size))
    assert [row["key"] for row in rows] == [f"{n}.png" for n in range(10)]
    images, valid = torch.zeros(10, 3, 8, 8, dtype=torch.uint8), torch.ones(10)
    for n in range(10):
        if n in {2, 5, 9}:
            valid[n] = 0
        else:
            images[n] = decode(Path(folder, f"{n}.png").read_bytes())
    with torch.inference_mode():
        best = model.load()(normalize(images), valid).logits.softmax(-1).topk(5)
    for n, row in enumerate(rows):
        if not valid[n]:
            assert row["top5_index"] is row["top5_class"] is row["top5_prob"] is None
            assert row["error"]
        else:
            assert row["error"] is None
            assert row["top5_index"] == best.indices[n].tolist()
            assert row["top5_class"] == [str(i) for i in row["top5_index"]]
            np.testing.assert_allclose(row["top5_prob"], best.values[n], rtol=1e-5)
    assert rows[2]["error"].startswith("not an image of a known format")
    with torch.inference_mode():
        wanted = model.load().features(normalize(images), valid)
    for n, row in enumerate(rows_of(predictor(model, folder, batch_size=batch_size, features=True))):
        assert row.keys() == {"key", "features", "error", "part"}
        assert (row["features"] is None) == bool(row["error"]) == (not valid[n])
        if valid[n]:
            np.testing.assert_allclose(row["features"], wanted[n], rtol=1e-5, atol=1e-6)


def test_class_names_operating_points_and_crop(folder: str, tmp_path: Path):
    """A file that is missing by now is a bad image."""
    few = exported(tmp_path / "few.safetensors", {"model.num_classes": 3, "model.width": 16})
    _, parts = list_parts(folder, None, group=1)
    Path(folder, "1.png").unlink()
    rows = predictor(few, folder, classes=("ant", "bee", "cat"))(pa.Table.from_pylist(parts)).to_pylist()
    assert [row["error"] is None for row in rows].count(True) == 6
    assert rows[1]["error"] == "no such file"
    row = rows[0]
    assert row["top5_class"] == [("ant", "bee", "cat")[i] for i in row["top5_index"]]
    assert sum(row["top5_prob"]) == pytest.approx(1)

    model = exported(tmp_path / "groups.safetensors", GROUPS)
    as_trained = rows_of(predictor(model, folder))
    assert rows_of(predictor(model, folder, point=RoutingOverrides(k=1))) != as_trained
    with pytest.raises(UsageError, match="k=9 exceeds num_experts=4"):
        rows_of(predictor(model, folder, point=RoutingOverrides(k=9)))

    (tmp_path / "large").mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (16, 32, 3))
    (tmp_path / "large/0.png").write_bytes(png(pixels))
    whole = torch.from_numpy(pixels.astype("uint8")).permute(2, 0, 1)[None]
    middle = resize(whole, [16, 16], antialias=True)[..., 4:12, 4:12]
    changes = {"model.width": 16, "data.eval_resize": "square", "data.eval_crop": 0.5}
    cropped = exported(tmp_path / "crop.safetensors", changes)
    (row,) = rows_of(predictor(cropped, str(tmp_path / "large")))
    expected = cropped.load()(normalize(middle)).logits.softmax(-1).max().item()
    assert row["top5_prob"][0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("loss", ["sigmoid", "softmax"])
@pytest.mark.parametrize("threshold", [0.0, 0.3, 1.0])
def test_every_class_at_or_above_a_probability(
    threshold: float, loss: str, pack_greys: Callable[..., Any], tmp_path: Path
):
    """By a loop over all classes; none is an empty list, and files have the columns."""
    path, _ = pack_greys(train=6)
    model = exported(tmp_path / "model.safetensors", {"model.width": 16, "task.loss": loss})
    names = [f"class {n}" for n in range(10)]
    _, parts = list_parts(path, "val", group=1)
    table = predictor(model, path, threshold=threshold, classes=names)(pa.Table.from_pylist(parts))
    (written,) = write_parts(str(tmp_path / "out"), [table])
    assert written.column_names == ["key", "above_index", "above_class", "above_prob", "error"]
    pixels = torch.stack([torch.full((3, 8, 8), n, dtype=torch.uint8) for n in (6, 7, 8)])
    with torch.inference_mode():
        logits = model.load()(normalize(pixels)).logits
    probabilities = logits.sigmoid() if loss == "sigmoid" else logits.softmax(-1)
    counts = []
    for row, p in zip(written.to_pylist(), probabilities.tolist(), strict=True):
        wanted = [n for n in sorted(range(10), key=lambda n: -p[n]) if p[n] >= threshold]
        assert (row["above_index"], row["error"]) == (wanted, None)
        assert row["above_class"] == [names[n] for n in wanted]
        assert row["above_prob"] == pytest.approx([p[n] for n in wanted], rel=1e-5)
        counts.append(len(wanted))
    assert {0.0: min(counts) == 10, 0.3: 0 < max(counts) < 10, 1.0: max(counts) == 0}[threshold]


PLANNED = {
    "model": "/runs/soft/checkpoints/step-00000200",
    "model_sha256": "a",
    "images": "/data/photos",
    "images_sha256": "b",
    "split": None,
    "routing": {},
    "group": 1,
    "background": None,
    "white": None,
    "classes": ["cat", "dog"],
}


def test_a_call_that_continues(tmp_path: Path):
    """It keeps the parts and the class names that it began with, whatever moved meanwhile."""
    out = str(tmp_path / "out")
    assert begin(out, PLANNED, fresh=False) == (PLANNED, set())
    for part in (0, 7, 1_234_567):
        (tmp_path / "out" / file_of(part)).write_bytes(b"")
    torn = tmp_path / "out/part-000002.parquet.0abc.tmp"
    torn.write_bytes(b"")
    moved = {**PLANNED, "model": "/elsewhere", "images": "/elsewhere", "classes": None}
    assert begin(out, moved, fresh=False) == (PLANNED, {0, 7, 1_234_567})
    assert not torn.exists()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_sha256", "c"),
        ("images_sha256", "c"),
        ("split", "val"),
        ("routing", {"k": 1}),
        ("group", 8),
        ("background", "white"),
        ("white", 4095),
        ("features", True),
        ("threshold", 0.5),
        ("names", ["cat"]),
        ("dtype", "bfloat16"),
    ],
)
def test_nothing_is_mixed(field: str, value: Any, tmp_path: Path):
    out, other = str(tmp_path), {**PLANNED, field: value}
    begin(out, PLANNED, fresh=False)
    assert begin(out, other, fresh=False) == (other, set())  # nothing is lost as long as nothing is there
    begin(out, PLANNED, fresh=False)
    (tmp_path / file_of(3)).write_bytes(b"")
    (tmp_path / "notes.txt").write_bytes(b"")
    with pytest.raises(UsageError, match=rf"another {field} \(was .*, now .*\): choose another `out`"):
        begin(out, other, fresh=False)
    assert begin(out, other, fresh=True) == (other, set())
    assert sorted(file.name for file in tmp_path.iterdir()) == [PLAN, "notes.txt"]


def test_a_fresh_start_that_fails_mixes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The plan stays that of the parts as long as one is there."""

    def busy(_: str) -> None:
        raise OSError("busy")

    begin(str(tmp_path), PLANNED, fresh=False)
    (tmp_path / file_of(3)).touch()
    monkeypatch.setattr(storage, "delete", busy)
    with pytest.raises(OSError, match="busy"):
        begin(str(tmp_path), {**PLANNED, "group": 8}, fresh=True)
    assert begin(str(tmp_path), PLANNED, fresh=False) == (PLANNED, {3})


def test_a_pool_has_an_actor_for_each_gpu(monkeypatch: pytest.MonkeyPatch):
    """With its share of the CPUs where they are fewest, and one at least; a lost node has none."""
    nodes = [
        {"Alive": alive, "Resources": resources}
        for alive, resources in [
            (True, {"CPU": 16.0, "GPU": 2.0}),
            (True, {"CPU": 9.0, "GPU": 2.0}),
            (True, {"CPU": 1.0}),
            (False, {"CPU": 2.0, "GPU": 1.0}),
        ]
    ]
    have = {"CPU": 26.0, "GPU": 4.0}
    monkeypatch.setattr("orchestrator.evaluation.predict.most_resources", lambda: have)
    monkeypatch.setattr("ray.nodes", lambda: nodes)
    assert pool_size(None) == (4, {"num_gpus": 1.0, "num_cpus": 4.0})
    with pytest.raises(UsageError, match="`workers` 5: each takes one of the 4 GPUs of the cluster"):
        pool_size(5)
    nodes.append({"Alive": True, "Resources": {"CPU": 1.0, "GPU": 2.0}})
    assert pool_size(3) == (3, {"num_gpus": 1.0, "num_cpus": 1.0})


@pytest.mark.slow
def test_the_pool_and_what_goes_wrong_in_it(
    cluster: None, tmp_path: Path, pack_greys: Callable[..., Any], bucket: Bucket
):
    """One Ray for all of it. An error in an actor is the error that it raised, without what Ray wraps it in;
    a write that fails leaves no file.
    """
    assert pool_size(None) == (2, {"num_cpus": 1.0})
    with pytest.raises(UsageError, match="`workers` 3: each takes one of the 2 CPUs of the cluster"):
        pool_size(3)
    path, _ = pack_greys(train=150, val=3)
    settings = {
        "model": exported(tmp_path / "model.safetensors"),
        "point": RoutingOverrides(),
        "images": path,
        "batch_size": 50,
        "classes": None,
        "each": {"num_cpus": 1.0},
    }
    _, parts = list_parts(path, None, group=1)
    tables = list(write_parts(str(tmp_path / "out"), predict_in_pool(parts, workers=2, **settings)))
    assert sorted(len(table) for table in tables) == [3, 22, 64, 64]
    assert all(table.schema.equals(SCHEMA) for table in tables)
    assert sorted(storage.names(str(tmp_path / "out"))) == [file_of(n) for n in range(4)]
    with bucket.failing("busy"), pytest.raises(OSError, match="out/part-00000"):
        list(write_parts(bucket.uri("out"), predict_in_pool(parts, workers=1, **settings)))
    assert bucket.all_keys() == []
    shard = next(Path(path).glob("val/*.parquet"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"!")
    with pytest.raises(UsageError, match=shard.name):
        list(write_parts(str(tmp_path / "again"), predict_in_pool(parts, workers=1, **settings)))


@each_model
def test_an_image_has_the_same_answer_in_every_batch(router: RouterConfig | None) -> None:
    """To the bit, in 50 random batches, orders and numbers of threads, with bad images among them, for each
    router that routes images one by one. The MLPs are so wide that torch sums in parts if it has threads, and
    torch's sigmoid rounds otherwise behind the last 32 numbers.
    """
    config = replace(vit_config(router), mlp_dim=1024, num_classes=9)
    vit, rng, threads = ViT(config), Random(0), torch.get_num_threads()
    torch.nn.init.normal_(vit.head.weight, generator=torch.Generator().manual_seed(1))
    run = override(RunConfig(), {"model": to_dict(vit.config), "task.loss": "sigmoid"})
    ref = ModelRef(name="m", location="", run=run, step=0, signature=signature_of(run))
    predictor = Predictor(ref, AS_TRAINED, "", 64, None, shared=vit.eval())
    predictor.shared = False  # it is alone
    pixels = torch.randint(0, 256, (12, 3, 8, 8), generator=torch.Generator().manual_seed(0)).byte()
    pool = {str(number): image for number, image in enumerate(pixels)} | {"bad": BadImage("no image")}
    found: dict[str, Any] = {}
    try:
        for _ in range(50):
            batch = [rng.choice([*pool.items()]) for _ in range(rng.randint(1, 40))]
            torch.set_num_threads(rng.choice([1, 2, 3, 8]))
            for row in predictor._predict(batch):
                assert found.setdefault(row["key"], row) == row, (len(batch), torch.get_num_threads())
    finally:
        torch.set_num_threads(threads)
    assert len(found) == len(pool)

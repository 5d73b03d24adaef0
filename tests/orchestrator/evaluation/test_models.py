"""Trained models by every name that a user may have for them."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from moe.exported import load
from orchestrator import storage
from orchestrator.checkpoint.manifest import find_checkpoint
from orchestrator.checkpoint.models import ModelRef, read_model
from orchestrator.checkpoint.weights import read_metadata, write_file
from orchestrator.errors import UsageError
from orchestrator.evaluation.models import find_models, load_model
from orchestrator.evaluation.soup import write_soup
from orchestrator.runs.run_directory import RunDir
from orchestrator.sweeps.build import sweep_frontier
from orchestrator.tracking.registry import register
from orchestrator.tracking.store import Tracking
from tests.mlflow_reader import find_sweep, newest_of
from tests.trained_sweep import open_store


@pytest.fixture
def store(trained_home: Path) -> Tracking:
    return open_store(trained_home)


def found(reference: str, home: Path, store: Tracking) -> ModelRef:
    (model,) = find_models(reference, root=str(home), tracking_uri=store.uri)
    return model


def test_one_model_by_five_names(trained_home: Path, store: Tracking):
    """All are the checkpoint of step 20, known to MLflow; the export says where it came from."""
    folder = f"{trained_home}/tiny/trials/soft/checkpoints"
    by_name = found("tiny/trials/soft", trained_home, store)
    assert by_name.step == 20
    assert by_name.location == f"{folder}/step-00000020"
    assert by_name.directory == f"{trained_home}/tiny/trials/soft"
    run = newest_of(store, by_name.directory)
    assert run
    for reference in (folder, f"{folder}/step-00000020", f"runs:/{run.run_id}"):
        same = found(reference, trained_home, store)
        assert (same.location, same.step, same.directory) == (by_name.location, 20, by_name.directory)
    exported = found(f"{trained_home}/soft.safetensors", trained_home, store)
    assert (exported.step, exported.directory) == (20, by_name.directory)
    weights, of_export = by_name.load().state_dict(), exported.load().state_dict()
    assert all(torch.equal(weights[name], of_export[name]) for name in weights)
    earlier = found(f"{folder}/step-00000010", trained_home, store)
    assert earlier.step == 10
    assert [model.name for model in (by_name, exported, earlier)] == [
        "tiny/trials/soft",
        "tiny/trials/soft@20",
        "tiny/trials/soft@10",
    ]


def test_a_run_that_was_moved_aside_keeps_its_weights(trained_home: Path, store: Tracking, tmp_path: Path):
    """Its tag says where it lies, whatever is at the place of its config now."""
    dense = newest_of(store, f"{trained_home}/tiny/trials/dense")
    assert dense
    moved = shutil.copytree(f"{trained_home}/tiny/trials/dense", tmp_path / "dense.old-1")
    was = store.client.get_run(dense.run_id).data.tags["directory"]
    store.client.set_tag(dense.run_id, "directory", str(moved))
    try:
        assert found(f"runs:/{dense.run_id}", trained_home, store).location.startswith(str(moved))
    finally:
        store.client.set_tag(dense.run_id, "directory", was)


def test_a_sweep_means_its_finished_trials(trained_home: Path, store: Tracking):
    models = find_models("sweep:tiny", root=str(trained_home), tracking_uri=store.uri)
    assert [model.name for model in models] == ["dense", "token", "soft"]
    assert all(model.directory == f"{trained_home}/tiny/trials/{model.name}" for model in models)


def test_a_soup_is_of_no_one_run(trained_home: Path, store: Tracking, tmp_path: Path):
    """Whatever its file is called: `soft` here is another run's name below the same storage."""
    folder = f"{trained_home}/tiny/trials/soft/checkpoints"
    models = [found(f"{folder}/step-000000{step}", trained_home, store) for step in (10, 20)]
    out = tmp_path / "soft.safetensors"
    write_soup(models, str(out))
    soup = found(str(out), trained_home, store)
    assert soup.directory is None
    assert soup.name == "soft"


def test_a_sweep_has_names_for_its_frontier(trained_home: Path, store: Tracking):
    """They are those of the registry, without MLflow, and the frontier loads the same weights."""
    frontier, *_ = sweep_frontier(f"{trained_home}/tiny")
    named = {"fast": frontier.front[0], "knee": frontier.knee, "best": frontier.front[-1]}
    for alias, point in named.items():
        expected = f"{trained_home}/tiny/trials/{point.run_id}/checkpoints/step-00000020"
        weights = point.load().head.weight
        registered = found(f"models:/tiny@pareto-{alias}", trained_home, store)
        for reference in (f"tiny@{alias}", f"tiny@pareto-{alias}", f"{trained_home}/tiny@{alias}"):
            model = found(reference, trained_home, store)
            assert (model.location, model.directory) == (expected, registered.directory)
            by_name = load_model(reference, root=str(trained_home), tracking_uri="sqlite:///nowhere.db")
            assert torch.equal(by_name.head.weight, weights)
    assert torch.equal(frontier["soft"].load().head.weight, load_trial(trained_home, "soft").head.weight)
    assert not frontier["soft"].load().training
    with pytest.raises(KeyError, match="no arm 'wide'; the arms are dense, token, soft"):
        frontier["wide"]


def load_trial(home: Path, name: str) -> Any:
    result = RunDir(f"{home}/tiny/trials/{name}").result()
    assert result is not None
    return result.load()


def test_a_model_that_is_gone_is_named(trained_home: Path, tmp_path: Path):
    """The error is the same for the point of an arm, the result of a run and the name of a sweep."""
    copy = shutil.copytree(trained_home / "tiny", tmp_path / "tiny")
    (point, *_) = sweep_frontier(str(copy))[0].front
    shutil.rmtree(copy / f"trials/{point.run_id}/checkpoints")
    for load_it in (
        point.load,
        lambda: load_trial(tmp_path, point.run_id),
        lambda: load_model("tiny@fast", root=str(tmp_path)),
    ):
        with pytest.raises(UsageError, match=f"{copy}/trials/{point.run_id}/checkpoints/step-00000020"):
            load_it()
    (copy / "summary.json").unlink()
    with pytest.raises(UsageError, match="the sweep tiny has no model @fast: none of its arms is finished"):
        load_model("tiny@fast", root=str(tmp_path))


def test_a_registered_model(trained_home: Path, store: Tracking, tmp_path: Path):
    """By its alias, its run and its name. Weights that took its place are refused."""
    soft = found("tiny/trials/soft", trained_home, store)
    run = newest_of(store, f"{trained_home}/tiny/trials/soft")
    assert run
    _, manifest = find_checkpoint(soft.location)
    model = {"uri": soft.location, "weights": manifest.weights_digest(), "description": ""}
    sweep = {"key": "of the sweep", "directory": f"{trained_home}/tiny"}
    register(store, "a sweep", {"fast": (run.run_id, model)}, **sweep)
    assert found("models:/a sweep@fast", trained_home, store).location == soft.location
    for reference in ("models:/a sweep@fast", "tiny/trials/soft", f"runs:/{run.run_id}"):
        loaded = load_model(reference, root=str(trained_home), tracking_uri=store.uri)
        assert torch.equal(loaded.head.weight, soft.load().head.weight)
        assert not loaded.training
    moved = {**model, "uri": soft.location.replace("soft", "dense")}
    register(store, "a sweep", {"fast": (run.run_id, moved)}, **sweep)
    with pytest.raises(UsageError, match="holds other weights than were registered"):
        load_model("models:/a sweep@fast", tracking_uri=store.uri)


def test_names_mean_in_python_what_they_mean_to_commands(
    trained_home: Path, store: Tracking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Names are looked up below $MOE_FRONTIER_HOME, and in its MLflow store unless another one is named."""
    monkeypatch.chdir(tmp_path)
    run = newest_of(store, f"{trained_home}/tiny/trials/soft")
    assert run
    names = ("tiny/trials/soft", f"runs:/{run.run_id}")
    with pytest.raises(
        UsageError, match=r"no MLflow store at .*: set MLFLOW_TRACKING_URI .* or MOE_FRONTIER_HOME"
    ):
        load_model(names[1])
    monkeypatch.setenv("MOE_FRONTIER_HOME", str(trained_home))
    for name in names:
        assert torch.equal(load_model(name).head.weight, found(name, trained_home, store).load().head.weight)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/none.db")
    with pytest.raises(UsageError, match=r"no MLflow store at .*none\.db"):
        load_model(names[1])


def test_labels_must_mean_what_the_model_learned(
    trained_home: Path, pack_greys: Callable[..., Any], caplog: pytest.LogCaptureFixture
):
    """The same names in the same order, or the first of them; by number alone if the names are unknown."""
    model = read_model(f"{trained_home}/tiny/trials/soft/checkpoints")
    path, _ = pack_greys(train=4)
    manifest = Path(path, "manifest.json")
    names = list("0123456789")

    def relabel(names: list[str]) -> None:
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"classes": names}))

    model.check_classes(path)
    relabel(names[:9])
    model.check_classes(path)
    unknown = replace(model, signature=replace(model.signature, classes=None))
    for others in (names[::-1], ["zero", *names[1:]], [*names, "ten"]):
        relabel(others)
        with pytest.raises(UsageError, match=r"soft learned the classes \(0, 1, 2, .. 10\): its predictions"):
            model.check_classes(path)
        if len(others) == 10:
            caplog.clear()
            unknown.check_classes(path)
            assert "The classes of tiny/trials/soft are unknown" in caplog.text
    with pytest.raises(UsageError, match=r"learned unknown classes \(10 outputs\)"):
        unknown.check_classes(path)


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        (
            "nothing",
            "no trained model 'nothing': .*/nothing has no checkpoint, and neither has .*; name a run below",
        ),
        ("/nowhere/run", "no trained model '/nowhere/run': /nowhere/run has no checkpoint; name a run"),
        (
            "tiny",
            "tiny is a sweep, not one model: name its tiny@knee, or a trial, such as tiny/trials/dense,",
        ),
        ("tiny@slow", "the sweep tiny has no model @slow: there is tiny@fast, tiny@knee, tiny@best"),
        ("tiny@confirmed", "the sweep tiny has no model @confirmed: there is"),
        ("nothing@knee", "no trained model 'nothing@knee'"),
        ("/nowhere/weights.safetensors", "no file /nowhere/weights.safetensors"),
        ("models:/moe-frontier@slow", "no model models:/moe-frontier@slow at sqlite:"),
        ("runs:/0123456789abcdef0123456789abcdef", "MLflow at .*not found"),
        ("sweep:none", "no sweep 'none'"),
        ("runs:/SWEEP", "is a sweep, not one model"),
    ],
)
def test_what_is_not_there(reference: str, message: str, trained_home: Path, store: Tracking):
    reference = reference.replace("SWEEP", find_sweep(store, "tiny").run_id)
    with pytest.raises(UsageError, match=message):
        find_models(reference, root=str(trained_home), tracking_uri=store.uri)


def flip_last_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_damaged_weights_are_named(trained_home: Path, tmp_path: Path):
    shutil.copytree(f"{trained_home}/tiny/trials/soft/checkpoints/step-00000020", tmp_path / "copy")
    (weights,) = (tmp_path / "copy").glob("weights*")
    flip_last_bit(weights)
    with pytest.raises(UsageError, match=f"checkpoint {tmp_path}/copy is damaged: {weights.name}"):
        read_model(str(tmp_path / "copy"))


def test_loading_reads_the_weights_once(
    trained_home: Path, store: Tracking, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """They are hashed as they are read. If they are damaged, the checkpoint before is loaded."""
    read: list[str] = []
    pieces = storage.pieces

    def counted(location: str) -> Iterator[bytes]:
        read.append(location)
        return pieces(location)

    monkeypatch.setattr(storage, "pieces", counted)
    load_model("tiny/trials/soft", root=str(trained_home))
    (weights,) = (name for name in read if "weights-" in name)
    shutil.copytree(f"{trained_home}/tiny/trials/soft/checkpoints", tmp_path / "checkpoints")
    flip_last_bit(tmp_path / "checkpoints" / "step-00000020" / Path(weights).name)
    loaded = load_model(str(tmp_path / "checkpoints"))
    before = found(f"{trained_home}/tiny/trials/soft/checkpoints/step-00000010", trained_home, store).load()
    assert torch.equal(loaded.head.weight, before.head.weight)


@pytest.mark.parametrize(
    "change",
    [
        {"step": "last"},
        {"config": "{"},
        {"config": "[1]"},
        {"config": "[" * 100_000},
        {"signature": "x"},
        {"signature": "5"},
        {"signature": "[" * 100_000},
        {"model.width": "x"},
        {"model.width": 2**40},
        {"model.width": 2**70},
    ],
    ids=str,
)
def test_damaged_metadata_of_an_export(change: dict[str, Any], trained_home: Path, tmp_path: Path):
    """One clear error, of `moe.exported` too where it reads what is damaged."""
    whole = read_metadata(f"{trained_home}/soft.safetensors")
    if width := change.get("model.width"):
        config = json.loads(whole["config"])
        change = {"config": json.dumps(config | {"model": config["model"] | {"width": width}})}
    path = f"{tmp_path}/damaged.safetensors"
    write_file(path, load_file(f"{trained_home}/soft.safetensors"), whole | change)
    with pytest.raises(UsageError, match=path):
        load_model(path)
    if "config" in change:
        with pytest.raises(ValueError, match=f"{path} is not an export: "):
            load(path)


@pytest.mark.parametrize(
    "header", [b'{"__metadata__": null}', b'{"__metadata__": []}', b"[" * 100_000, b"[]"]
)
def test_headers_that_are_none(header: bytes, tmp_path: Path):
    path = tmp_path / "damaged.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(UsageError, match=f"{path} is not a safetensors file"):
        load_model(str(path))
    with pytest.raises(ValueError, match=str(path)):
        load(path)

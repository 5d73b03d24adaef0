"""Records of storages that were moved, copied or renamed, and of runs whose plugins are not all there."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator import plugins
from orchestrator.codec import override, to_dict
from orchestrator.config import RunConfig
from orchestrator.errors import UsageError
from orchestrator.plugins import load_plugins
from orchestrator.records import Move, at_its_place, read_run
from orchestrator.runs.run_directory import RunDir, acquire_run_dir
from orchestrator.runs.sweep_directory import SweepDir
from orchestrator.sweeps.sweep import Sweep
from tests.made_directories import begin_sweep
from tests.orchestrator.test_plugins import PEAKED

OWN = Path(__file__).parents[1] / "own"


def config_of(storage: Path | str, name: str = "sweep/trials/arm") -> dict:
    changes = {
        "name": name,
        "storage": str(storage),
        "data.path": f"{storage}/data/digits",
        "train.init_from": f"{storage}/sweep/trials/first/checkpoints",
        "train.fewshot": {"paths": [f"{storage}/data/few", "/elsewhere/few"]},
    }
    return to_dict(override(RunConfig(), changes))


def places(config: dict) -> list[str]:
    train = config["train"]
    named = [config["name"], config["storage"], config["data"]["path"], train["init_from"]]
    return [*named, *train["fewshot"]["paths"]]


@pytest.mark.parametrize(
    ("directory", "storage", "sweep"),
    [
        ("/new/sweep/trials/arm", "/new", "sweep"),
        ("/new/three/trials/arm", "/new", "three"),
        ("s3://bucket/runs/sweep/trials/arm", "s3://bucket/runs", "sweep"),
        ("", "/old", "sweep"),  # unknown, as of a file
        ("/new/no run!", "/old", "sweep"),
    ],
)
def test_what_lay_below_the_storage_is_looked_for_below_todays(
    directory, storage, sweep, monkeypatch
) -> None:
    monkeypatch.setattr("orchestrator.records.exists_at", lambda location: False)
    config = config_of("/old")
    assert places(Move(config, directory).config(config)) == [
        f"{sweep}/trials/arm",
        storage,
        f"{storage}/data/digits",
        f"{storage}/{sweep}/trials/first/checkpoints",
        f"{storage}/data/few",
        "/elsewhere/few",
    ]


def test_a_copy_of_a_run_alone_finds_what_stayed(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in ("data/digits", "data/few"):
        (old / folder).mkdir(parents=True)
    config = config_of(old, "run")
    found = Move(config, f"{new}/run").config(config)
    assert found["data"]["path"] == f"{old}/data/digits"
    (new / "data/digits").mkdir(parents=True)
    found = Move(config, f"{new}/run").config(config)
    assert found["data"]["path"] == f"{new}/data/digits"
    assert found["train"]["fewshot"]["paths"] == [f"{old}/data/few", "/elsewhere/few"]


def test_a_file_finds_data_below_the_storage_of_the_command(tmp_path: Path) -> None:
    (tmp_path / "data/digits").mkdir(parents=True)
    config = config_of("/gone", "run")
    found = at_its_place(config, "/files/model.safetensors", str(tmp_path))
    assert (found["data"]["path"], found["storage"]) == (f"{tmp_path}/data/digits", "/gone")


def test_records_of_a_moved_and_renamed_sweep(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    base = override(RunConfig(), {"name": "sweep", "storage": str(old), "data.path": f"{old}/data/digits"})
    arms = {"tuned": {"train.init_from": f"{old}/first/checkpoints"}}
    begin_sweep(Sweep(base=base, arms=arms), arms=arms)
    trial = override(base, {"name": "sweep/trials/tuned", **arms["tuned"]})
    acquire_run_dir(trial, "d" * 64)
    old.rename(new)
    (new / "sweep").rename(new / "three")
    record = SweepDir(f"{new}/three").record()
    assert record is not None
    assert (record.name, record.base["name"], record.base["storage"]) == ("three", "three", str(new))
    assert record.base["data"]["path"] == f"{new}/data/digits"
    assert record.arms == {"tuned": {"train.init_from": f"{new}/first/checkpoints"}}
    now = override(
        trial,
        {
            "name": "three/trials/tuned",
            "storage": str(new),
            "data.path": f"{new}/data/digits",
            "train.init_from": f"{new}/first/checkpoints",
        },
    )
    found = RunDir.of(now).record()
    assert found is not None
    assert found.config == to_dict(now)
    assert acquire_run_dir(now, "d" * 64, "resume").key == found.key


@pytest.fixture
def forgotten() -> Iterator[None]:
    """Plugins are loaded into this process for good: this undoes it."""
    before = {**plugins._texts}
    yield
    for plugin in [plugin for plugin in plugins._texts if plugin not in before]:
        del plugins._texts[plugin]
        plugins._forget(plugins._module(plugin))


def forget(name: str) -> None:
    (plugin,) = (each for each in plugins._texts if each.startswith(name))
    del plugins._texts[plugin]
    plugins._forget(plugins._module(plugin))


@pytest.mark.usefixtures("forgotten")
def test_weights_need_the_plugins_of_their_model_and_task_alone(tmp_path: Path) -> None:
    (tmp_path / "peak.py").write_text(PEAKED)
    load_plugins([OWN / "cosine.py", tmp_path / "peak.py"])
    run = override(RunConfig(), {"model.moe.router.kind": "cosine", "train.schedule.kind": "peak"})
    written = json.loads(json.dumps(to_dict(run)))
    forget("peak.py")
    found = read_run(written)
    assert found.model == run.model
    assert to_dict(found.train) == written["train"]  # nothing is made up
    assert [plugin.partition("@")[0] for plugin in found.plugins] == ["cosine.py"]
    assert read_run(json.loads(json.dumps(to_dict(found)))).train == found.train
    forget("cosine.py")
    with pytest.raises(UsageError, match=r"made with the plugin cosine.py .* it is not loaded"):
        read_run(written)


@pytest.mark.usefixtures("forgotten")
def test_a_model_is_not_read_by_another_version_of_its_plugin(tmp_path: Path) -> None:
    own = tmp_path / "cosine.py"
    own.write_text((OWN / "cosine.py").read_text())
    load_plugins([own])
    written = to_dict(override(RunConfig(), {"model.moe.router.kind": "cosine"}))
    forget("cosine.py")
    own.write_text(own.read_text() + "\n# changed\n")
    load_plugins([own])
    with pytest.raises(UsageError, match=r"made with the plugin cosine.py .* is loaded: load that file"):
        read_run(written)


def test_newer_places_come_first(tmp_path: Path) -> None:
    for folder in ("was", "now"):
        (tmp_path / folder).mkdir()
    config = to_dict(override(RunConfig(), {"storage": str(tmp_path), "data.path": f"{tmp_path}/was"}))
    newer = {"data": {"path": f"{tmp_path}/now"}}
    assert Move(config).config(config, newer)["data"]["path"] == f"{tmp_path}/now"

"""MLflow as a real store: one run per directory, nothing twice, nothing infinite; models come back."""

import json
import pickle
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from mlflow import MlflowClient

from moe.layer import MoEConfig
from moe.presets import PRESETS
from moe.routers import RouterConfig, SoftConfig, TokenChoiceConfig
from moe.vit import ViT
from orchestrator.codec import flat, to_dict
from orchestrator.config import DataConfig, RunConfig, TrainConfig, UsageError
from orchestrator.tracking import (
    EXPERIMENT,
    TrackedRun,
    Tracking,
    children,
    find_sweep,
    load_model,
    open_tracking,
    register_model,
    track,
    track_training,
)

NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Tracking:
    """Creating its tables takes seconds: one for all tests, each with runs of its own."""
    folder = tmp_path_factory.mktemp("mlflow")
    return open_tracking(f"sqlite:///{folder}/mlflow.db", artifacts=f"{folder}/artifacts")


@pytest.fixture
def client(store: Tracking) -> MlflowClient:
    return MlflowClient(store.uri)


def history(client: MlflowClient, tracked: TrackedRun, name: str) -> list[tuple[int, float]]:
    return [(m.step, m.value) for m in client.get_metric_history(tracked.run_id, name)]


def num_runs(client: MlflowClient, store: Tracking) -> int:
    return len(client.search_runs([store.experiment_id], max_results=1000))


def run_config(router: RouterConfig | None = None, name: str = "run") -> RunConfig:
    moe = MoEConfig(num_experts=4, router=router) if router else None
    return RunConfig(
        name=name, model=replace(PRESETS["debug"], moe=moe), data=DataConfig(path="/data", batch_size=8)
    )


def test_opening_twice_is_opening_once(store: Tracking, client: MlflowClient) -> None:
    assert open_tracking(store.uri, artifacts="/elsewhere") == store
    assert client.get_experiment(store.experiment_id).name == EXPERIMENT


def test_files_lie_where_they_should(store: Tracking, client: MlflowClient, tmp_path: Path) -> None:
    tracked = track(store, str(tmp_path), "files", tags={})
    (tmp_path / "page.html").write_text("<p>")
    tracked.write_text("notes/a.txt", "hello")
    tracked.write_file(tmp_path / "page.html")
    assert tracked.read_text("notes/a.txt") == "hello"
    assert tracked.read_text("page.html") == "<p>"
    location = client.get_experiment(store.experiment_id).artifact_location
    assert Path(location, tracked.run_id, "artifacts", "notes", "a.txt").read_text() == "hello"


def test_a_directory_has_one_run(store: Tracking, client: MlflowClient, tmp_path: Path) -> None:
    before = num_runs(client, store)
    first = track(store, str(tmp_path), "one", batch_size=8, tags={"color": "red"})
    first.finish("FAILED")
    assert client.get_run(first.run_id).info.status == "FAILED"
    again = track(store, str(tmp_path), "one", batch_size=8, tags={"size": "small"})
    assert again.run_id == first.run_id
    assert num_runs(client, store) == before + 1
    run = client.get_run(first.run_id)
    assert (run.info.status, run.info.run_name) == ("RUNNING", "one")
    assert {"color": "red", "size": "small"}.items() <= run.data.tags.items()
    assert track(store, str(tmp_path / "other"), "one", tags={}).run_id != first.run_id
    again.finish("FINISHED")
    assert client.get_run(first.run_id).info.status == "FINISHED"


def test_another_store_means_another_run(store: Tracking, tmp_path: Path) -> None:
    """A run id means nothing to a store that did not give it."""
    (tmp_path / "mlflow_run.json").write_text(json.dumps({"uri": "http://other", "run_id": "0" * 32}))
    tracked = track(store, str(tmp_path), "moved", tags={})
    assert tracked.run_id != "0" * 32
    assert track(store, str(tmp_path), "moved", tags={}).run_id == tracked.run_id


def test_the_axis_is_images_seen(store: Tracking, client: MlflowClient, tmp_path: Path) -> None:
    tracked = track(store, str(tmp_path), "axis", batch_size=8, tags={})
    tracked.log(1, {"loss": 3.0})
    tracked.log(5, {"loss": 2.0, "acc": 0.5})
    assert history(client, tracked, "loss") == [(8, 3.0), (40, 2.0)]
    assert history(client, tracked, "acc") == [(40, 0.5)]


def test_a_replayed_step_is_not_written_twice(store: Tracking, client: MlflowClient, tmp_path: Path) -> None:
    """By the same object, by one that was unpickled elsewhere, and by one that a new process makes."""
    tracked = track(store, str(tmp_path), "replay", batch_size=2, tags={})
    tracked.log(1, {"loss": 3.0})
    tracked.log(2, {"loss": 2.0})
    tracked.log(2, {"loss": 99.0})
    other = pickle.loads(pickle.dumps(tracked))
    other.log(1, {"loss": 99.0})
    resumed = track(store, str(tmp_path), "replay", batch_size=2, tags={})
    resumed.log(1, {"loss": 99.0})
    resumed.log(2, {"loss": 99.0, "val": 0.25})
    resumed.log(3, {"loss": 1.0})
    resumed.log(2, {"val": 99.0})
    assert history(client, tracked, "loss") == [(2, 3.0), (4, 2.0), (6, 1.0)]
    assert history(client, tracked, "val") == [(4, 0.25)]


def test_what_is_not_finite_is_dropped_and_tagged(
    store: Tracking, client: MlflowClient, tmp_path: Path
) -> None:
    tracked = track(store, str(tmp_path), "diverging", tags={})
    tracked.log(1, {"loss": 3.0, "acc": 0.1})
    assert "diverged" not in client.get_run(tracked.run_id).data.tags
    tracked.log(2, {"loss": NAN, "norm": INF, "acc": 0.2})
    tracked.log(3, {"loss": -INF})
    data = client.get_run(tracked.run_id).data
    assert data.metrics == {"loss": 3.0, "acc": 0.2}
    assert data.tags["diverged"] == "true"
    assert history(client, tracked, "loss") == [(1, 3.0)]


def test_a_run_of_nothing_but_nans(store: Tracking, client: MlflowClient, tmp_path: Path) -> None:
    tracked = track(store, str(tmp_path), "nans", tags={})
    tracked.log(1, {"loss": NAN})
    assert client.get_run(tracked.run_id).data.metrics == {}
    assert client.get_run(tracked.run_id).data.tags["diverged"] == "true"


def test_params_and_config(store: Tracking, client: MlflowClient, tmp_path: Path) -> None:
    run = run_config(SoftConfig(), name="sweep/arm-3")
    tracked = track_training(store, run, str(tmp_path), role="trial")
    found = client.get_run(tracked.run_id)
    assert found.data.params == {name: str(value) for name, value in flat(run).items()}
    assert (found.info.run_name, found.data.tags["role"]) == ("arm-3", "trial")
    assert json.loads(tracked.read_text("config.json")) == json.loads(json.dumps(to_dict(run)))
    assert tracked.batch_size == 8


def test_params_are_those_of_the_start(store: Tracking, client: MlflowClient, tmp_path: Path) -> None:
    """A resumed run may be split another way, but MLflow's params never change."""
    run = run_config()
    tracked = track_training(store, run, str(tmp_path))
    again = track_training(store, replace(run, train=TrainConfig(microbatch=2)), str(tmp_path))
    assert again.run_id == tracked.run_id
    assert client.get_run(tracked.run_id).data.params["train.microbatch"] == "None"
    assert json.loads(tracked.read_text("config.json"))["train"]["microbatch"] is None


class Dies(Exception):
    pass


def test_a_run_with_params_has_its_config(
    store: Tracking, client: MlflowClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Params say that nothing is left to write, so a process that dies before the config has written none."""
    run = run_config()

    def dies(self: TrackedRun, name: str, text: str) -> None:
        raise Dies(name)

    with monkeypatch.context() as patch:
        patch.setattr(TrackedRun, "write_text", dies)
        with pytest.raises(Dies, match=r"config\.json"):
            track_training(store, run, str(tmp_path))
    tracked = track_training(store, run, str(tmp_path))
    assert json.loads(tracked.read_text("config.json"))["name"] == "run"
    assert client.get_run(tracked.run_id).data.params


def test_a_sweep_and_its_children(store: Tracking, tmp_path: Path) -> None:
    first = track(store, str(tmp_path / "first"), "families", tags={"role": "sweep"})
    time.sleep(0.002)  # start times have milliseconds
    sweep = track(store, str(tmp_path / "second"), "families", tags={"role": "sweep"})
    track(store, str(tmp_path / "not-a-sweep"), "families", tags={})
    track(store, str(tmp_path / "another"), "other", tags={"role": "sweep"})
    runs = [run_config(router, name=f"families/arm-{i}") for i, router in enumerate((None, SoftConfig()))]
    for run in runs:
        trial = track_training(store, run, str(tmp_path / run.name), parent=sweep, arm=run.name[-1])
        trial.log(3, {"val/acc1": 0.5})
        trial.finish("FINISHED")
        time.sleep(0.002)
    track_training(store, run_config(), str(tmp_path / "stranger"), parent=first)

    found = find_sweep(store, "families")
    assert (found.tracked.run_id, found.name, found.status) == (sweep.run_id, "families", "RUNNING")
    trials = children(store, found.tracked)
    assert [trial.name for trial in trials] == ["arm-0", "arm-1"]
    assert [trial.tags["arm"] for trial in trials] == ["0", "1"]
    assert [trial.config() for trial in trials] == runs
    assert all(trial.metrics == {"val/acc1": 0.5} for trial in trials)
    assert {trial.status for trial in trials} == {"FINISHED"}
    assert all(trial.url is None for trial in trials)  # no page without a server


def test_no_such_sweep(store: Tracking) -> None:
    with pytest.raises(UsageError, match="no sweep 'nothing' at sqlite:"):
        find_sweep(store, "nothing")


@pytest.fixture
def port_of_no_web_server():
    """Answers as sshd does."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(100)
                connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")

        threading.Thread(target=answer, daemon=True).start()
        yield server.getsockname()[1]


@pytest.mark.parametrize(
    "uri",
    [
        "http://127.0.0.1:9",
        "http://127.0.0.1:{port}",
        "http://127.0.0.1:port",
        "http://",
        "ftp://somewhere/x",
        "/some/folder",
    ],
)
def test_refused_uris(uri: str, port_of_no_web_server: int) -> None:
    uri, began = uri.format(port=port_of_no_web_server), time.perf_counter()
    with pytest.raises(UsageError) as caught:
        open_tracking(uri, artifacts="/nowhere")
    assert f" {uri}: " in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert time.perf_counter() - began < 10


@pytest.mark.parametrize("router", [None, SoftConfig(), TokenChoiceConfig(k=2)])
def test_a_registered_model_comes_back(router: RouterConfig | None, store: Tracking, tmp_path: Path) -> None:
    run = run_config(router)
    model = ViT(run.model, seed=3)
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(1))
    tracked = track_training(store, run, str(tmp_path))
    version = register_model(tracked, model, run, alias="best")
    images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    for uri in (f"models:/moe-frontier/{version}", "models:/moe-frontier@best"):
        loaded = load_model(uri, store.uri)
        assert not loaded.training
        assert loaded.config == run.model
        with torch.no_grad():
            assert torch.equal(loaded(images).logits, model(images).logits)


def test_an_alias_moves_on(store: Tracking, tmp_path: Path) -> None:
    run = run_config()
    versions = []
    for seed in (1, 2):
        tracked = track_training(store, run, str(tmp_path / str(seed)))
        versions.append(register_model(tracked, ViT(run.model, seed=seed), run, alias="moving"))
    assert int(versions[1]) == int(versions[0]) + 1
    embed = load_model("models:/moe-frontier@moving", store.uri).embed.weight
    assert torch.equal(embed, ViT(run.model, seed=2).embed.weight)


@pytest.mark.parametrize(
    "name", ["nothing@best", "nothing/1", "moe-frontier@nothing", "moe-frontier/999", "x"]
)
def test_unknown_models(name: str, store: Tracking) -> None:
    with pytest.raises(UsageError, match=f"no model models:/{name} at sqlite:"):
        load_model(f"models:/{name}", store.uri)


def test_models_of_mlflows_own_setting(store: Tracking, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store.uri)
    with pytest.raises(UsageError, match=f"no model models:/x/1 at {store.uri}"):
        load_model("models:/x/1")

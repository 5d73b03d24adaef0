"""What belongs to a run or a sweep is removed with it, whatever fails; what has no owner is found."""

import json
import random
import threading
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from orchestrator import storage, stores
from orchestrator.errors import UsageError
from orchestrator.frontier.points import as_shown
from orchestrator.runs import lock as lock_file, metrics_file, notice
from orchestrator.runs.lock import holder_of, locked, move_aside
from orchestrator.runs.measurements import made_by
from orchestrator.runs.run_directory import RunDir, write_json
from orchestrator.runs.state import directory_state
from orchestrator.runs.sweep_directory import SweepDir
from orchestrator.sweeps import housekeeping
from orchestrator.sweeps.housekeeping import OLD, ownerless, remove_everywhere, stop, take
from orchestrator.sweeps.overview import Entry, entries
from orchestrator.sweeps.publish import publish
from orchestrator.sweeps.sweep import Sweep
from orchestrator.tracking.find import KEY, SWEEP_KEY
from orchestrator.tracking.registry import model_name
from orchestrator.tracking.removal import registered
from orchestrator.tracking.store import Tracking, open_tracking
from orchestrator.tracking.sync import Sync
from orchestrator.training.train import working_in
from tests.lanes import mostly_slow
from tests.made_directories import begin, begin_sweep, end, end_sweep, report, run_at
from tests.orchestrator.buckets import Bucket

ACCURACIES = {"a": 0.5, "b": 0.7, "c": 0.6}
# `test_storage` has the laws of S3, and the smoke lane takes random steps there.
on_disk_and_slowly_on_s3 = pytest.mark.parametrize(
    "root", mostly_slow(["local", "s3"], fast=["local"]), indirect=True
)


@pytest.fixture(scope="module")
def one_store(empty_store: Callable[[Path], str], tmp_path_factory: pytest.TempPathFactory) -> Tracking:
    folder = tmp_path_factory.mktemp("housekeeping")
    return open_tracking(empty_store(folder), artifacts=f"{folder}/artifacts")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """In an object storage a process counts as killed after two seconds, and a request is seen at once."""
    monkeypatch.setattr(lock_file, "LEASE_S", 2.0)
    monkeypatch.setattr(metrics_file, "S3_POLL_S", 0.2)
    monkeypatch.setattr(housekeeping, "STOP_S", 30.0)


def killed_in(directory: str) -> None:
    """Leaves the lock of a process that was killed on a machine that is gone."""
    lock = json.dumps({"holder": "h", "host": "gone", "pid": 7}).encode()
    storage.write_bytes(f"{directory}/lock", lock)
    wait_for_its_end(directory)


def wait_for_its_end(directory: str) -> None:
    """Waits until a process that was killed counts as killed: a copy of its lock is as young as a new one."""
    while (holder := holder_of(directory)) and holder.lives:
        time.sleep(0.1)


def copied(place: str, target: str) -> None:
    for name in storage.files(place):
        storage.write_bytes(f"{target}/{name}", storage.read_bytes(f"{place}/{name}"))


def made_sweep(root: str, name: str, store: Tracking) -> str:
    """A finished sweep with checkpoints, of which a is cheapest and best and c is dominated, in MLflow."""
    sweep = Sweep(base=run_at(root, name), arms={arm: {} for arm in ACCURACIES})
    directory = end_sweep(sweep, {**ACCURACIES}, labels=made_by())
    for arm in ACCURACIES:
        storage.write_bytes(f"{directory}/trials/{arm}/checkpoints/step-00000003/model.pt", b"w" * 1000)
    summary = {
        "note": "",
        "metrics": {"frontier/points": 1.0, "frontier/best/val/acc1": 0.7, "hypervolume": 0.1},
        "tags": {},
        "pareto": ["b"],
        "aliases": {
            "pareto-knee": {
                "run": "b",
                "checkpoint": "checkpoints/step-00000003",
                "weights": "b",
                "description": "the knee",
            }
        },
        "files": [],
        "tables": {},
    }
    SweepDir(directory).write_summary(summary)
    Sync(store, directory).update()
    return directory


def shown(store: Tracking, root: str) -> tuple[set[str], set[str]]:
    """Directories of the runs in MLflow, and the names of the registered models."""
    runs = store.client.search_runs([store.experiment_id])
    places = {run.data.tags["directory"] for run in runs}
    below = {place.removeprefix(f"{root}/") for place in places if place.startswith(f"{root}/")}
    return below, {model.name for model in registered(store)}


def named(root: str, name: str) -> Entry:
    (found,) = [entry for entry in entries(root) if entry.name == name]
    return found


@on_disk_and_slowly_on_s3
def test_a_storage_is_listed(root: str, one_store: Tracking) -> None:
    directory = made_sweep(root, "listed", one_store)
    running = [{"device_s": 60.0, "usd": 0.5, "pace": []}]
    write_json(SweepDir(directory).spent, {"device_s": 7200.0, "usd": 3.0, "jobs": [], "running": running})
    lost = run_at(root, "lost")
    killed_in(begin(lost))
    half = Sweep(base=run_at(root, "half"), arms={arm: {} for arm in ACCURACIES}, seeds=(0, 1))
    end_sweep(half, {"a-seed0": 0.1, "a-seed1": 0.2, "b-seed0": 0.4}, status="interrupted")
    storage.write_bytes(f"{root}/broken/sweep.json", b"{")
    storage.write_bytes(f"{root}/data/config.json", b"{}")  # a reserved name
    storage.write_bytes(f"{root}/notes.txt", b"of the user")
    assert [entry.name for entry in entries(root)] == ["broken", "lost", "half", "listed"]
    found = named(root, "listed")
    assert (found.state, found.arms_done, found.arms) == ("finished", 3, 3)
    assert (found.front, found.knee, found.quality_name, found.quality) == (1, "b", "val/acc1", 0.7)
    assert (found.device_s, found.usd) == (7260.0, 3.5)
    assert {"mlflow.user": found.user, "host": found.host} == made_by()
    sizes = (storage.size(f"{directory}/{name}") for name in storage.files(directory))
    assert found.size == sum(size or 0 for size in sizes) > 3000
    assert (named(root, "lost").state, named(root, "broken").state) == ("lost", "unreadable")
    found = named(root, "half")
    assert (found.state, found.arms_done, found.arms, found.quality) == ("stopped", 1, 3, 0.4)


@pytest.mark.guests
def test_a_run_is_listed_by_the_quality_of_its_task(tmp_path: Path) -> None:
    """In the unit of tables and pages; the quality of a plugin's task that is not loaded is unknown."""
    texts = run_at(tmp_path, "texts", task__kind="next_token", model__kind="decoder")
    begin(texts)
    end(texts, 3, **{texts.task.quality.replace("/", "__"): -0.5}, val__acc1=0.25)
    found = named(str(tmp_path), "texts")
    assert (found.quality_name, found.quality) == as_shown(texts.task.quality, -0.5)
    config = Path(tmp_path, "texts", "config.json")
    config.write_text(config.read_text().replace('"next_token"', '"of_a_plugin"'))
    found = named(str(tmp_path), "texts")
    assert (found.state, found.quality_name, found.quality) == ("finished", "", None)


def test_no_file_is_read_twice(tmp_path: Path, one_store: Tracking, monkeypatch: pytest.MonkeyPatch) -> None:
    made_sweep(str(tmp_path), "once", one_store)
    end(run_at(tmp_path, "alone"), 3, val__acc1=0.5)
    SweepDir(f"{tmp_path}/once").write_summary({})
    seen, read = list[str](), storage.read_bytes
    monkeypatch.setattr(storage, "read_bytes", lambda place: seen.append(place) or read(place))
    entries(str(tmp_path))
    assert len(seen) == len({*seen}) >= 4


def test_mlflow_shows_who_made_a_sweep_and_its_trials(tmp_path: Path, one_store: Tracking) -> None:
    directory = made_sweep(str(tmp_path), "owned", one_store)
    runs = one_store.client.search_runs([one_store.experiment_id], max_results=1000)
    ours = [run.data.tags for run in runs if run.data.tags["directory"].startswith(directory)]
    assert len(ours) == 4
    assert all(made_by().items() <= tags.items() for tags in ours)


@on_disk_and_slowly_on_s3
def test_a_sweep_is_removed_from_everywhere(root: str, one_store: Tracking) -> None:
    gone, kept = made_sweep(root, "gone", one_store), made_sweep(root, "kept", one_store)
    before, there = shown(one_store, root), storage.files(root)
    steps = remove_everywhere(root, "gone", one_store, dry_run=True)
    assert "the registered model gone with its aliases and 4 runs in MLflow" in steps[0].what
    assert steps[1].what.startswith(gone)
    assert (shown(one_store, root), storage.files(root)) == (before, there)
    artifacts = [
        Path(run.info.artifact_uri.removeprefix("file://"))
        for run in one_store.client.search_runs([one_store.experiment_id])
        if run.data.tags["directory"].startswith(gone)
    ]
    assert remove_everywhere(root, "gone", one_store)[-1].size >= steps[-1].size > 3000
    assert storage.names(root) == ["kept"]
    assert {f"kept/{name}" for name in storage.files(kept)} == {n for n in there if n.startswith("kept/")}
    assert not any(path.exists() for path in artifacts)
    runs, models = shown(one_store, root)
    assert runs == {"kept", *(f"kept/trials/{arm}" for arm in ACCURACIES)}
    assert ("gone" in models, "kept" in models) == (False, True)
    with pytest.raises(UsageError, match=r"no run or sweep in .*gone, and MLflow has none"):
        remove_everywhere(root, "gone", one_store)


def test_uploads_that_were_never_completed_go_with_their_sweep(bucket: Bucket, one_store: Tracking) -> None:
    for name in ("cut", "other"):
        begin(run_at(bucket.uri("runs"), name))
        key = f"runs/{name}/checkpoints/step-00000003/model.pt"
        stores.s3().create_multipart_upload(Bucket=bucket.name, Key=key)
    remove_everywhere(bucket.uri("runs"), "cut", one_store)
    assert bucket.uploads() == ["runs/other/checkpoints/step-00000003/model.pt"]


@on_disk_and_slowly_on_s3
def test_one_that_runs_is_refused(root: str, one_store: Tracking) -> None:
    directory = begin(run_at(root, "busy"))
    with locked(directory), pytest.raises(UsageError, match=r"a process works in .*stop it first"):
        remove_everywhere(root, "busy", one_store)
    assert RunDir(directory).record()


@pytest.mark.parametrize(
    ("root", "fails_at"),
    mostly_slow(
        [*product(["local"], [0, 1, 3, 6]), *product(["s3"], [4, 6, 8])], fast=[("local", 1), ("local", 6)]
    ),
    indirect=["root"],
)
def test_after_a_failure_anywhere_the_same_call_finishes(
    fails_at: int, root: str, one_store: Tracking, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"failing{fails_at}"
    made_sweep(root, name, one_store)
    calls = 0

    def failing(real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **more: object) -> object:
            nonlocal calls
            calls += 1
            if calls == fails_at + 1:
                raise OSError("killed")
            return real(*args, **more)

        return call

    client = type(one_store.client)
    with monkeypatch.context() as patch:
        for what in ("delete_run", "delete_registered_model"):
            patch.setattr(client, what, failing(getattr(client, what)))
        patch.setattr(storage, "delete", failing(storage.delete))
        with pytest.raises((OSError, UsageError), match="killed"):
            remove_everywhere(root, name, one_store)
    remove_everywhere(root, name, one_store)
    assert shown(one_store, root)[0] == set()
    assert name not in shown(one_store, root)[1]
    assert storage.names(root) == []


@on_disk_and_slowly_on_s3
def test_the_frontier_is_kept(root: str, one_store: Tracking) -> None:
    directory = made_sweep(root, "thinned", one_store)
    name = model_name("thinned")
    for _ in range(2):  # the second time there is nothing to do
        steps = remove_everywhere(root, "thinned", one_store, keep_frontier=True)
    assert steps == []
    assert [arm for arm in "abc" if storage.files(f"{directory}/trials/{arm}/checkpoints")] == ["b"]
    results = [RunDir(f"{directory}/trials/{arm}").result() for arm in "abc"]
    assert [(r.checkpoint != "", r.metrics["val/acc1"]) for r in results if r] == [
        (False, 0.5),
        (True, 0.7),
        (False, 0.6),
    ]
    models = one_store.client.search_logged_models([one_store.experiment_id])
    ours = [model.name for model in models if model.tags["checkpoint"].startswith(directory)]
    assert ours == ["b"]
    assert "pareto-knee" in one_store.client.get_registered_model(name).aliases
    assert publish(directory).points
    Sync(one_store, directory).update()
    assert ours == [
        model.name
        for model in one_store.client.search_logged_models([one_store.experiment_id])
        if model.tags["checkpoint"].startswith(directory)
    ]


def test_only_a_sweep_that_is_over_has_a_frontier_to_keep(tmp_path: Path, one_store: Tracking) -> None:
    begin_sweep(Sweep(base=run_at(tmp_path, "open"), arms={"a": {}}), status="interrupted")
    with pytest.raises(UsageError, match="no sweep that is over"):
        remove_everywhere(str(tmp_path), "open", one_store, keep_frontier=True)


@on_disk_and_slowly_on_s3
def test_a_copy_is_removed_alone(root: str, one_store: Tracking) -> None:
    made_sweep(root, "original", one_store)
    before = shown(one_store, root)
    copied(f"{root}/original", f"{root}/copy")
    remove_everywhere(root, "copy", one_store)
    assert storage.names(root) == ["original"]
    assert shown(one_store, root) == before


@on_disk_and_slowly_on_s3
def test_what_a_command_writes_now_has_an_owner(
    root: str, one_store: Tracking, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(run_at(root, "user"))
    monkeypatch.setattr(housekeeping, "UNUSED_S", -2.0)
    with locked(f"{root}/user"), locked(f"{root}/starts"):
        storage.write_bytes(f"{root}/user/result.json.{'0' * 32}.tmp", b"{")
        assert ownerless(root, one_store) == []
    assert len(ownerless(root, one_store)) >= 1


@on_disk_and_slowly_on_s3
def test_what_has_no_owner_is_found(root: str, one_store: Tracking, monkeypatch: pytest.MonkeyPatch) -> None:
    storage.delete(made_sweep(root, "by-hand", one_store))
    storage.delete(f"{made_sweep(root, 'partly', one_store)}/trials/c")
    killed_in(f"{root}/nothing")
    storage.write_bytes(f"{root}/evaluation/workers-1/config.json", b"{}")
    storage.write_bytes(f"{root}/imports/used-1/config.json", b"{}")
    storage.write_bytes(f"{root}/imports/unused-1/config.json", b"{}")
    begin(run_at(root, "user", train__init_from=f"{root}/imports/used-1"))
    storage.write_bytes(f"{root}/user/result.json.{'0' * 32}.tmp", b"{")
    storage.write_bytes(f"{root}/mine/notes.txt", b"of the user")
    expected = [
        "by-hand, which is gone",
        "trials/c, which is gone",
        "nothing: a lock of nothing",
        "evaluation/workers-1: a cache",
        "imports/unused-1: named by no run",
        "tmp: half written",
    ]
    if storage.is_local(root):  # elsewhere nothing is moved aside
        move_aside(made_sweep(root, "fresh", one_store))
        expected.append("fresh.old-1, moved aside")
    monkeypatch.setattr(housekeeping, "UNUSED_S", -2.0)
    steps = ownerless(root, one_store)
    said = "\n".join(sorted(step.what for step in steps))
    assert [what for what in expected if what not in said] == [], said
    assert len(steps) == len(expected)
    take(steps)
    assert ownerless(root, one_store) == []
    left = [name for name in storage.names(root) if storage.files(f"{root}/{name}")]
    assert left == ["imports", "mine", "partly", "user"]
    assert storage.names(f"{root}/imports") == ["used-1"]
    runs, models = shown(one_store, root)
    assert runs == {"partly", "partly/trials/a", "partly/trials/b"}
    assert {"by-hand", "fresh"} & models == set()


def test_a_request_in_the_directory_is_a_notice(root: str, one_store: Tracking) -> None:
    """Of whatever trains there, and for that alone: the same process may train again."""
    directory = begin(run_at(root, "asked"))
    own = RunDir(directory)
    own.ask_to_stop(for_good=True)  # of an earlier command
    found = list[str]()
    asks = threading.Thread(target=lambda: found.append(stop(directory)))
    with working_in(directory, "auto", one_store), notice.saving():
        assert storage.size(own.stop) is None
        asks.start()
        while asks.is_alive() and not notice.given():
            time.sleep(0.01)
    asks.join()
    assert found == ["stopped"]
    assert not notice.given()
    assert storage.size(own.stop) is None
    assert stop(directory) == "stopped"
    with pytest.raises(UsageError, match="no run or sweep"):
        stop(f"{root}/other")


@pytest.mark.parametrize(
    ("root", "seed", "steps"),
    [
        ("local", 10, 14),
        pytest.param("local", 2, 80, marks=pytest.mark.slow),  # seed 10 is in the fast lane
        pytest.param("s3", 11, 20, marks=pytest.mark.smoke),
    ],
    indirect=["root"],
)
def test_random_steps_leave_nothing_without_an_owner(
    seed: int, steps: int, root: str, one_store: Tracking, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Directories are made, killed, renamed, copied aside, and deleted by hand or by us, which is cut short
    now and then. Then everything without an owner is found, and nothing that has one is lost.
    """
    chance, made = random.Random(seed), 0

    def make() -> None:
        nonlocal made
        made += 1
        run = run_at(root, f"n{made}")
        if chance.random() < 0.4:
            arms = {"a": {}, "b": {}}
            directory = end_sweep(Sweep(base=run, arms=arms), {"a": 0.5})
        else:
            directory = begin(run)
            report(run, {1: {"train/loss": 1.0}})
        if chance.random() < 0.7:
            Sync(one_store, directory).update(live=chance.random() < 0.5)

    def kill(name: str) -> None:
        killed_in(f"{root}/{name}")
        storage.write_bytes(f"{root}/{name}/half.json.{'0' * 32}.tmp", b"{")

    def rename(name: str) -> None:
        copied(f"{root}/{name}", f"{root}/{name}x")
        storage.delete(f"{root}/{name}")
        wait_for_its_end(f"{root}/{name}x")

    def aside(name: str) -> None:
        move_aside(f"{root}/{name}")

    def delete(name: str) -> None:
        storage.delete(f"{root}/{name}")

    def rm(name: str) -> None:
        remove_everywhere(root, name, one_store)

    def rm_cut_short(name: str) -> None:
        planned = remove_everywhere(root, name, one_store, dry_run=True)
        with locked(f"{root}/{name}"):
            take(planned[: chance.randrange(len(planned) + 1)])

    def send(name: str) -> None:
        Sync(one_store, f"{root}/{name}").update()

    acts = [kill, rename, delete, rm, rm_cut_short, send, send]
    acts += [aside] if storage.is_local(root) else []
    for _ in range(steps):
        names = [entry.name for entry in entries(root)]
        if not names or chance.random() < 0.4:
            make()
        else:
            chance.choice(acts)(chance.choice(names))
    there = {entry.name: entry.key for entry in entries(root) if not OLD.fullmatch(entry.name)}
    monkeypatch.setattr(housekeeping, "UNUSED_S", -2.0)
    found = ownerless(root, one_store)
    assert len(found) > 3
    take(found)
    assert ownerless(root, one_store) == []
    assert {entry.name: entry.key for entry in entries(root)} == there
    keys = {*there.values()}
    runs = one_store.client.search_runs([one_store.experiment_id], max_results=1000)
    ours = [run.data.tags for run in runs if run.data.tags["directory"].startswith(f"{root}/")]
    assert {tags.get(SWEEP_KEY) or tags[KEY] for tags in ours} <= keys
    for model in registered(one_store):
        assert model.tags[SWEEP_KEY] in keys or not model.name.startswith("n")
    places = {name: f"{root}/{name}" for name in storage.names(root)}
    assert {name for name, place in places.items() if holder_of(place)} <= there.keys()
    assert all(map(directory_state, places.values()))
    assert not [name for name in storage.files(root) if name.endswith(".tmp")]

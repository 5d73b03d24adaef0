"""Checkpoints on S3, well and ill: what is reported, what stays, what a run continues from."""

import logging
from pathlib import Path

import pytest
import torch

from orchestrator import storage
from orchestrator.checkpoint import manifest as manifests
from orchestrator.checkpoint.manager import Checkpoints
from orchestrator.config import CheckpointConfig
from tests.lanes import mostly_slow
from tests.moe.parity import spawn
from tests.orchestrator.buckets import connect_anew
from tests.orchestrator.checkpoint.counted import IN_STEP, odd, restored, said, save, saved, step_restored
from tests.orchestrator.checkpoint.lives import Plan, check, died_saving, live
from tests.orchestrator.checkpoint.small_runs import assert_same, built, train, whole_state

LARGE = 100_000  # rows: files of several parts
KINDS = ["weights-", "optimizer-", "manifest.json"]
each_kind = pytest.mark.parametrize("kind", mostly_slow(KINDS, fast=["weights-", "manifest.json"]))


def one(bucket, step: int, kind: str) -> str:
    """The key of a checkpoint's file."""
    (key,) = (key for key in bucket.all_keys() if f"/step-{step:08d}/{kind}" in key)
    return key


@pytest.mark.parametrize("asynchronous", [True, False], ids=["beside training", "in step"])
def test_saved_and_resumed(asynchronous, bucket):
    directory = bucket.uri("checkpoints")
    saved(directory, 1, 2, 3, config=CheckpointConfig(asynchronous=asynchronous))
    assert step_restored(directory) == 3
    files = sorted(key.split("/")[-1].split(".")[0] for key in bucket.all_keys() if "step-00000003" in key)
    assert files == ["manifest", "optimizer-00000-002", "weights-00000-001"]
    assert manifests.steps(directory) == [2, 3]
    assert len(bucket.all_keys()) == 6


def two_workers(rank: int, ranks: int, folder: str) -> None:
    """Each uploads its files, and copies those that it needs in another layout."""
    directory = Path(folder, "uri").read_text()
    model, optimizer = built("soft, AdamW", seed=0, ep=2)
    train(model, optimizer, range(2))
    checkpoints = Checkpoints(directory, IN_STEP)
    checkpoints.save(2, model, optimizer, images=16, progress={}, config={})
    checkpoints.finish()
    assert checkpoints.failures == 0
    again, its_optimizer = built("soft, AdamW", seed=9, ep=1)
    assert Checkpoints(directory, IN_STEP).restore(again, its_optimizer)
    assert_same(whole_state(again, its_optimizer), whole_state(model, optimizer))


@pytest.mark.smoke
def test_of_two_workers(bucket, tmp_path):
    directory = bucket.uri("checkpoints")
    (tmp_path / "uri").write_text(directory)
    spawn(2, two_workers, str(tmp_path), timeout_s=60)
    assert len(bucket.all_keys()) == 5
    model, optimizer = built("soft, AdamW", seed=0)
    train(model, optimizer, range(2))
    again, its_optimizer = built("soft, AdamW", seed=9)
    assert Checkpoints(directory, IN_STEP).restore(again, its_optimizer)
    for name, tensor in whole_state(model, optimizer).items():
        torch.testing.assert_close(whole_state(again, its_optimizer)[name], tensor)


def test_names_are_taken_as_they_are(bucket):
    name = "a%20b #y?z=a+b ü &;"
    saved(bucket.uri(name, "checkpoints"), 1)
    assert step_restored(bucket.uri(name, "checkpoints")) == 1
    assert all(key.startswith(f"{name}/checkpoints/step-00000001/") for key in bucket.all_keys())


def test_a_storm_that_ends(bucket):
    """Its second is shorter than our patience: nothing is to be reported."""
    directory = bucket.uri("checkpoints")
    checkpoints = Checkpoints(directory, CheckpointConfig())
    with bucket.failing("busy", for_s=1, attempts=8):
        save(checkpoints, 1)
        checkpoints.finish()
    assert checkpoints.failures == 0
    assert step_restored(directory) == 1


@each_kind
@pytest.mark.parametrize("fault", mostly_slow(["busy", "cut upload", "short"], fast=["cut upload"]))
def test_one_file_that_cannot_be_written(fault, kind, bucket, caplog):
    """Training continues; the checkpoint before is intact; what the attempt left does not count."""
    directory = bucket.uri("checkpoints")
    checkpoints = Checkpoints(directory, CheckpointConfig(asynchronous=False))
    save(checkpoints, 1)
    before = bucket.all_keys()
    with bucket.failing(fault, lambda request: request.startswith("PUT") and kind in request):
        save(checkpoints, 2)
    assert checkpoints.failures == 1
    (line,) = said(caplog, logging.ERROR)
    assert f"saving step 2 to {directory} failed: OSError" in line
    assert bucket.all_keys() == before
    assert step_restored(directory) == 1
    save(checkpoints, 3)
    checkpoints.finish()
    assert manifests.steps(directory) == [1, 3]
    assert step_restored(directory) == 3


@pytest.mark.smoke
def test_a_connection_that_is_cut_once(bucket):
    """In the middle of each file, up and down: it is sent again."""
    directory = bucket.uri("checkpoints")
    for i, kind in enumerate(KINDS, start=1):
        checkpoints = Checkpoints(directory, IN_STEP)
        with bucket.failing(
            "cut upload", lambda request, kind=kind: f"/{kind}" in request, times=1, attempts=3
        ):
            save(checkpoints, i)
        assert checkpoints.failures == 0, kind
        with bucket.failing(
            "cut download", lambda request, kind=kind: f"/{kind}" in request, times=1, attempts=3
        ):
            assert step_restored(directory) == i, kind


def test_parts_that_cannot_be_written(bucket):
    """No part of a large file stays, not even where no listing shows it."""
    directory = bucket.uri("checkpoints")
    checkpoints = Checkpoints(directory, CheckpointConfig())
    save(checkpoints, 1, rows=LARGE)
    checkpoints.settle()
    before = bucket.all_keys()
    with bucket.failing("busy", lambda request: "partNumber=2" in request):
        save(checkpoints, 2, rows=LARGE)
        checkpoints.settle()
    assert any("partNumber=2" in request for request in bucket.proxy.requests)
    assert checkpoints.failures == 1
    assert bucket.all_keys() == before
    assert bucket.uploads() == []
    manifest = restored(directory, rows=LARGE)
    assert manifest
    assert manifest.step == 1


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["busy", "cut download", "silent"])
@pytest.mark.parametrize("what", ["everything", "list-type", "manifest.json", "weights-"])
def test_storage_that_does_not_answer(what, fault, bucket, monkeypatch):
    """That is not damage: no fallback, and nothing is deleted."""
    if fault == "silent":
        monkeypatch.setattr(storage, "TIMEOUT_S", 1)
    directory = bucket.uri("checkpoints")
    saved(directory, 1, 2)
    before = bucket.all_keys()
    picked = bucket.failing(fault, lambda request: what == "everything" or what in request)
    with picked, pytest.raises(OSError, match=r"."):
        Checkpoints(directory, IN_STEP).restore(*odd())
    assert bucket.all_keys() == before
    assert step_restored(directory) == 2


def test_a_server_that_is_gone(bucket, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    connect_anew()
    with pytest.raises(OSError, match="checkpoints"):
        Checkpoints(bucket.uri("checkpoints"), IN_STEP).restore(*odd())


@pytest.mark.parametrize(
    "count", [pytest.param(8, marks=pytest.mark.smoke), pytest.param(50, marks=pytest.mark.slow)]
)
def test_killed_at_random_moments(count, bucket):
    plan = Plan(bucket.uri("checkpoints"), lives=count, environment=bucket.environment)
    lives = live({"s3": plan})["s3"]
    check(lives)
    assert died_saving(lives) >= count / 2


@each_kind
def test_one_flipped_bit(kind, bucket, caplog):
    directory = bucket.uri("checkpoints")
    saved(directory, 1, 2)
    location = bucket.uri(one(bucket, 2, kind))
    content = bytearray(storage.read_bytes(location))
    content[len(content) // 3] ^= 4
    storage.write_bytes(location, bytes(content))
    assert step_restored(directory) == 1
    (line,) = said(caplog)
    assert f"{directory}/step-00000002 is damaged ({location.split('/')[-1]})" in line
    checkpoints = Checkpoints(directory, IN_STEP)
    checkpoints.restore(*odd())
    save(checkpoints, 2)  # in its place
    assert checkpoints.failures == 0
    assert step_restored(directory) == 2
    assert len(bucket.all_keys()) == 6


def test_what_killed_runs_left(bucket, caplog):
    """Unfinished uploads and files without a manifest go when a run starts; nothing else does."""
    directory = bucket.uri("runs/checkpoints")
    saved(directory, 1, 2)
    s3, name = storage._s3(), bucket.name
    foreign = ["notes.txt", "step-by-step/notes", "step-00000002/notes", "step-00000009/mine.safetensors"]
    kept = [f"runs/checkpoints/{path}" for path in foreign] + ["runs/checkpoints-2/step-00000001/x"]
    left = [
        "runs/checkpoints/step-00000002/weights-00001-001.0123abcd.safetensors",
        "runs/checkpoints/step-00000003/weights-00000-001.0123abcd.safetensors",
        "runs/checkpoints/step-00000003/optimizer-00000-002.0123abcd.safetensors",
    ]
    saved_keys = bucket.all_keys()
    for key in [*kept, *left]:
        s3.put_object(Bucket=name, Key=key, Body=b"content")
    for key in (left[1].replace("00000003", "00000004"), "runs/checkpoints-2/large"):
        s3.create_multipart_upload(Bucket=name, Key=key)
    assert step_restored(directory) == 2
    assert bucket.all_keys() == sorted([*saved_keys, *kept])
    assert bucket.uploads() == ["runs/checkpoints-2/large"]
    assert len(said(caplog)) == 3


def test_what_may_not_be_done(bucket, caplog, monkeypatch):
    """To list uploads is refused to some accounts; S3 answers 200 to a deletion that it refuses. Both are
    logged, and the run continues.
    """
    directory = bucket.uri("checkpoints")
    checkpoints = Checkpoints(directory, CheckpointConfig(asynchronous=False, keep_last=1))
    save(checkpoints, 1)

    def refuse(*args):
        raise OSError("AccessDenied when calling the ListMultipartUploads operation")

    monkeypatch.setattr(storage, "abort_uploads", refuse)
    assert step_restored(directory) == 1
    assert "ListMultipartUploads" in caplog.text
    refused = {"Errors": [{"Key": "k", "Code": "AccessDenied"}]}
    monkeypatch.setattr(storage._s3(), "delete_objects", lambda **_: refused)
    save(checkpoints, 2)
    assert checkpoints.failures == 0
    assert "deleting" in said(caplog)[-1]
    assert manifests.steps(directory) == [1, 2]

"""Checkpoints on S3, also when storage fails: what is reported, what stays, what a run continues from."""

from pathlib import Path

import pytest
import torch

from orchestrator import storage, stores
from orchestrator.checkpoint import manifest as manifests
from orchestrator.checkpoint.manager import Checkpoints
from orchestrator.config import CheckpointConfig
from tests.moe.parity import spawn
from tests.orchestrator.checkpoint.counted import IN_STEP, odd, said, save, saved, step_restored
from tests.orchestrator.checkpoint.lives import Plan, check, died_saving, live
from tests.orchestrator.checkpoint.small_runs import assert_same, built, train, whole_state

KINDS = ["weights-", "optimizer-", "manifest.json"]


@pytest.mark.parametrize("asynchronous", [True, False], ids=["beside training", "in step"])
def test_saved_and_resumed(asynchronous, bucket):
    """Names are taken as they are."""
    directory = bucket.uri("a%20b #y?z=a+b ü &;", "checkpoints")
    saved(directory, 1, 2, 3, config=CheckpointConfig(asynchronous=asynchronous))
    assert step_restored(directory) == 3
    files = sorted(key.split("/")[-1].split(".")[0] for key in bucket.all_keys() if "step-00000003" in key)
    assert files == ["manifest", "optimizer-00000-002", "weights-00000-001"]
    assert manifests.steps(directory) == [2, 3]
    assert len(bucket.all_keys()) == 6


def two_workers(rank: int, ranks: int, folder: str) -> None:
    """Each worker uploads its files, and copies the files that it needs in another layout."""
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
def test_two_workers(bucket, tmp_path):
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


def test_each_byte_is_fetched_once(bucket, monkeypatch):
    """A worker hashes the copies that it reads tensors from."""
    directory, pieces, fetched = bucket.uri("checkpoints"), storage.pieces, []
    saved(directory, 1)

    def counted(location: str):
        for piece in pieces(location):
            fetched.append((location, len(piece)))
            yield piece

    monkeypatch.setattr(storage, "pieces", counted)
    assert step_restored(directory) == 1
    whole = {name: file.bytes for name, file in manifests.read(f"{directory}/step-00000001").files.items()}
    from_s3 = [(at, count) for at, count in fetched if at.startswith("s3://") and at.endswith(".safetensors")]
    assert {location.split("/")[-1]: count for location, count in from_s3} == whole
    assert len(from_s3) == len(whole) == 2


@pytest.mark.smoke
def test_faults_that_end(bucket):
    """A second of refusals, and a connection cut in the middle of each file, up and down, are retried."""
    directory = bucket.uri("checkpoints")
    checkpoints = Checkpoints(directory, IN_STEP)
    with bucket.failing("busy", for_s=1, attempts=8):
        save(checkpoints, 4)
    assert checkpoints.failures == 0
    for step, kind in enumerate(KINDS, start=5):

        def holds(request: str, kind: str = kind) -> bool:
            return f"/{kind}" in request

        with bucket.failing("cut upload", holds, times=1, attempts=3):
            save(checkpoints, step)
        assert checkpoints.failures == 0, kind
        with bucket.failing("cut download", holds, times=1, attempts=3):
            assert step_restored(directory) == step, kind


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["busy", "cut download", "silent"])
@pytest.mark.parametrize("what", ["everything", "list-type", "manifest.json", "weights-"])
def test_storage_that_does_not_answer(what, fault, bucket, monkeypatch):
    """This is not damage: no older checkpoint is tried, and nothing is deleted."""
    if fault == "silent":
        monkeypatch.setattr(stores, "TIMEOUT_S", 1)
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
    stores.forget()
    with pytest.raises(OSError, match="checkpoints"):
        Checkpoints(bucket.uri("checkpoints"), IN_STEP).restore(*odd())


STRIDES = [pytest.param(5, 9, marks=pytest.mark.smoke), pytest.param(50, 1, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("count", "stride"), STRIDES)
def test_kills(count, stride, bucket):
    plan = Plan(bucket.uri("checkpoints"), lives=count, stride=stride, environment=bucket.environment)
    lives = live({"s3": plan})["s3"]
    check(lives)
    assert died_saving(lives) >= count / 3


def test_one_flipped_bit(bucket, caplog):
    directory = bucket.uri("checkpoints")
    saved(directory, 1, 2)
    (key,) = (key for key in bucket.all_keys() if "/step-00000002/weights-" in key)
    content = bytearray(storage.read_bytes(bucket.uri(key)))
    content[len(content) // 3] ^= 4
    storage.write_bytes(bucket.uri(key), bytes(content))
    checkpoints = Checkpoints(directory, IN_STEP)
    manifest = checkpoints.restore(*odd())
    assert manifest
    assert manifest.step == 1
    (line,) = said(caplog)
    assert f"{directory}/step-00000002 is damaged ({key.split('/')[-1]})" in line
    save(checkpoints, 2)  # replaces the damaged checkpoint
    assert checkpoints.failures == 0
    assert step_restored(directory) == 2
    assert len(bucket.all_keys()) == 6


def test_what_killed_runs_left(bucket, caplog):
    """A start removes unfinished uploads and files without a manifest, and nothing else."""
    directory = bucket.uri("runs/checkpoints")
    saved(directory, 1, 2)
    s3, name = stores.s3(), bucket.name
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


def test_missing_permissions(bucket, caplog, monkeypatch):
    """Some accounts may not list uploads; S3 answers 200 to a deletion that it refuses. Both are logged, and
    the run continues.
    """
    directory = bucket.uri("checkpoints")
    checkpoints = Checkpoints(directory, CheckpointConfig(asynchronous=False, keep_last=1))
    save(checkpoints, 1)

    def refuse(*args):
        raise OSError("AccessDenied when calling the ListMultipartUploads operation")

    monkeypatch.setattr(storage, "abort_uploads", refuse)
    assert step_restored(directory) == 1
    assert "ListMultipartUploads" in caplog.text
    with bucket.failing("refused deletion", lambda request: "?delete" in request):
        save(checkpoints, 2)
    assert checkpoints.failures == 0
    assert "removing old files" in said(caplog)[-1]
    assert "AccessDenied" in said(caplog)[-1]
    assert manifests.steps(directory) == [1, 2]

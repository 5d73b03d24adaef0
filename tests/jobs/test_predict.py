"""`jobs/predict.py` as a user runs it: killed and started again, every image once."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest

from jobs import predict
from orchestrator.evaluation.predict import begin, digest_of
from tests.orchestrator.evaluation.exported import exported
from tests.parts import png, to_each

ROOT = Path(__file__).parents[2]


def start(home: Path, *args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "jobs/predict.py", *args],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "RAY_ADDRESS": "local", "MOE_FRONTIER_HOME": str(home)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finished(job: subprocess.Popen[str]) -> str:
    """What it printed. The last lines of its log are in the error if it failed."""
    out, log = job.communicate(timeout=300)
    assert job.returncode == 0, log[-3000:]
    return out + log


def kill_with_its_ray(driver: subprocess.Popen[str]) -> None:
    family = [*psutil.Process(driver.pid).children(recursive=True), psutil.Process(driver.pid)]
    to_each(psutil.Process.kill, family)
    psutil.wait_procs(family, timeout=30)


@pytest.mark.slow
def test_killed_in_the_middle_and_run_again(tmp_path):
    """10,000 images, two of them broken; SIGKILL for the driver and all of its Ray."""
    images, out = tmp_path / "images", tmp_path / "out"
    encoded = [png(np.random.default_rng(n).integers(0, 256, (8, 8))) for n in range(50)]
    for n in range(10_000):
        if n % 1000 == 0:
            (images / f"{n // 1000}").mkdir(parents=True)
        (images / f"{n // 1000}/{n:05d}.png").write_bytes(encoded[n % 50])
    broken = {"0/00007.png", "9/09999.png"}
    for name in broken:
        (images / name).write_bytes(encoded[0][:30])
    model = exported(tmp_path / "model.safetensors").location
    command = (model, "--images", str(images), "--out", str(out), "--batch-size", "16")

    job = start(tmp_path / "home", *command)
    give_up = time.monotonic() + 200
    while len(list(out.glob("*.parquet"))) < 10:
        assert job.poll() is None, job.communicate()[1][-3000:]
        assert time.monotonic() < give_up
        time.sleep(0.02)
    kill_with_its_ray(job)
    before = {file.name: file.stat().st_mtime_ns for file in out.glob("*.parquet")}
    assert 10 <= len(before) < 157  # parts of 64

    said = finished(start(tmp_path / "home", *command))
    after = {file.name: file.stat().st_mtime_ns for file in out.glob("*.parquet")}
    assert len(after) == 157
    assert after.items() >= before.items()
    assert f"{10_000 - 64 * len(before):,} of 10,000 images are left to predict" in said
    assert sorted(set(os.listdir(out)) - set(after)) == ["_plan.json"]
    assert "1 of " in said or "2 of " in said
    assert "9/09999.png: " in said

    table = pq.read_table(out)  # as a user would: without naming the files
    keys = table["key"].to_pylist()
    assert len(keys) == len(set(keys)) == 10_000
    assert {key for key, error in zip(keys, table["error"].to_pylist(), strict=True) if error} == broken
    by_key = dict(zip(keys, table["top5_prob"].to_pylist(), strict=True))
    assert by_key["1/01000.png"] == by_key["8/08000.png"]  # the same image


def test_what_is_complete_needs_no_ray(tmp_path, pack_greys, empty_home, call):
    path, manifest = pack_greys(train=6)
    model = exported(tmp_path / "model.safetensors")
    flags = (model.location, "--images", path, "--split", "val", "--out", f"{tmp_path}/out")
    plan = {
        "model": model.location,
        "model_sha256": digest_of(model.location),
        "images": path,
        "images_sha256": manifest.digest(),
        "split": "val",
        "routing": {},
        "group": 1,
        "classes": None,
    }
    begin(f"{tmp_path}/out", plan, fresh=False)
    (tmp_path / "out/part-000000.parquet").touch()
    stopped, out = call(predict.main, *flags)
    assert (stopped, out.splitlines()[1]) == ("", f"3 images in 1 file: {tmp_path}/out")

    other = exported(tmp_path / "other.safetensors", seed=1)
    stopped, _ = call(predict.main, other.location, *flags[1:])
    assert stopped.startswith(
        f"error: {tmp_path}/out has 1 file of predictions by {model.location} for {path} with another"
        " model_sha256 (was "
    )
    (tmp_path / "out/_plan.json").unlink()
    stopped, _ = call(predict.main, *flags)
    assert stopped == (
        f"error: {tmp_path}/out has parquet files and no _plan.json: choose another --out, or use --fresh"
    )


def test_what_is_refused(tmp_path, pack_greys, empty_home, call):
    path, _ = pack_greys(train=6)
    changes = {"model.moe.router.kind": "soft", "model.moe.images_per_group": 4}
    model = exported(tmp_path / "model.safetensors", changes).location
    flags = ("--images", path, "--out", f"{tmp_path}/out")
    for args, message in [
        (("nothing", *flags), "error: no trained model 'nothing'"),
        ((model, *flags, "--batch-size", "6"), "error: --batch-size 6 must be a multiple of 4, the routing"),
        ((model, *flags, "--set", "routing.magic=1"), "error: 'routing.magic=1': an operating point"),
    ]:
        stopped, out = call(predict.main, *args)
        assert stopped.startswith(message)
        assert len(out.splitlines()) <= 1
    assert not (tmp_path / "out").exists()


def test_never_among_images_or_other_results(tmp_path, empty_home, call):
    """Said before images are listed."""
    model = exported(tmp_path / "model.safetensors").location
    images, photos = tmp_path / "images", tmp_path / "images/photos"
    photos.mkdir(parents=True)
    (photos / "a.png").write_bytes(png(np.zeros((8, 8))))
    for source, out in ((images, images), (images, photos), (photos, images), (photos, f"{photos}/new")):
        stopped, _ = call(predict.main, model, "--images", str(source), "--out", str(out))
        assert stopped == (
            f"error: --out {out} and the source {source} lie in each other: choose another --out"
        )
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "frontier.html").touch()
    nowhere = f"{tmp_path}/nowhere"
    stopped, _ = call(predict.main, model, "--images", nowhere, "--out", str(taken))
    holds = f"error: --out {taken} holds other files (frontier.html): choose a new or an empty folder"
    assert stopped == holds
    stopped, _ = call(predict.main, model, "--images", nowhere, "--out", "/proc/nope")
    assert stopped == "error: --out /proc/nope cannot be written to: No such file or directory"
    assert [file.name for file in photos.iterdir()] == ["a.png"]

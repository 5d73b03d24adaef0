"""Reports that survive kills, in files that grow and, on S3, in segments."""

import itertools
import json
import logging
import math
import resource
import signal
import time
from pathlib import Path

import pytest

from orchestrator import storage
from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.runs import metrics_file
from orchestrator.runs.metrics_file import (
    SEGMENT_S,
    LineReader,
    LineWriter,
    LogFile,
    MetricsWriter,
    asked_by,
    poll_s,
    read_metrics,
)
from orchestrator.runs.run_directory import RunDir
from tests.orchestrator.buckets import Bucket


@pytest.fixture(params=["local", "s3"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "local":
        return str(tmp_path)
    bucket: Bucket = request.getfixturevalue("bucket")
    return bucket.uri("home")


def run_at(folder: str) -> RunConfig:
    return override(RunConfig(), {"storage": folder, "name": "run", "data.batch_size": 8})


def report(writer: MetricsWriter, *steps: int, loss: float) -> None:
    for step in steps:
        writer.report(step, {"train/loss": loss})


def losses(folder: str) -> dict[int, float]:
    return {row.step: row.metrics["train/loss"] for row in read_metrics(f"{folder}/run")}


def test_steps_after_the_checkpoint_are_taken_back_by_a_resume(folder: str) -> None:
    """The first process dies at step 50, its checkpoint is of step 20; the second reports other steps."""
    first = MetricsWriter(run_at(folder))
    report(first, 10, 20, 30, 50, loss=1.0)
    first.flush()
    second = MetricsWriter(run_at(folder))
    second.resumed(20)
    report(second, 30, 40, loss=2.0)
    second.close()
    assert losses(folder) == {10: 1.0, 20: 1.0, 30: 2.0, 40: 2.0}
    rows = read_metrics(f"{folder}/run")
    assert [row.images for row in rows] == [80, 160, 240, 320]
    assert all(a.time_s <= b.time_s for a, b in itertools.pairwise(rows))
    report(first, 15, loss=1.0)  # it was only taken for dead
    first.close()
    assert [row.step for row in read_metrics(f"{folder}/run")] == [10, 15, 20, 30, 40]


def test_a_reader_gets_each_line_once(folder: str) -> None:
    writer, reader = LineWriter(folder, "metrics"), LineReader(folder, "metrics")
    assert reader.new() == []
    for number in (0, 1, math.inf):
        writer.append({"n": number})
        writer.flush()
        assert reader.new() == [{"n": number}]
    writer.close()
    assert reader.new() == []
    assert LineReader(folder, "metrics").new() == [{"n": n} for n in (0, 1, math.inf)]


def test_half_a_line_of_a_killed_process_is_cut_off(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"n": 1}\n{"n": ')
    reader = LineReader(str(tmp_path), "metrics")
    assert reader.new() == [{"n": 1}]
    writer = LineWriter(str(tmp_path), "metrics")
    writer.append({"n": 2})
    writer.close()
    assert reader.new() == [{"n": 2}]
    assert [json.loads(line)["n"] for line in file.read_text().splitlines()] == [1, 2]


def test_segments_never_replace_each_other(bucket: Bucket) -> None:
    """A worker that was taken for dead goes on writing beside the one in its place."""
    folder = bucket.uri("run")
    writers = [LineWriter(folder, "metrics") for _ in range(2)]
    for number, writer in enumerate(writers * 2):
        writer.append({"n": number})
        writer.flush()
    assert sorted(row["n"] for row in LineReader(folder, "metrics").new()) == [0, 1, 2, 3]
    assert storage.names(folder) == [f"metrics-{n:06d}.jsonl" for n in range(1, 5)]


def test_segments_are_uploaded_now_and_then(bucket: Bucket) -> None:
    """A driver sees reports between checkpoints too, and not each costs a request."""
    folder = bucket.uri("run")
    writer = LineWriter(folder, "metrics")
    writer.append({"n": 1})
    assert LineReader(folder, "metrics").new() == []
    writer._flushed_s -= SEGMENT_S
    writer.append({"n": 2})
    assert LineReader(folder, "metrics").new() == [{"n": 1}, {"n": 2}]
    writer.append({"n": 3})
    assert storage.names(folder) == ["metrics-000001.jsonl"]


def test_a_folder_may_be_a_uri(tmp_path: Path) -> None:
    writer = LineWriter(f"file://{tmp_path}/run", "metrics")
    writer.append({"n": 1})
    writer.close()
    assert LineReader(f"file://{tmp_path}/run", "metrics").new() == [{"n": 1}]


def test_half_a_copy_of_a_file_has_no_lines(folder: str) -> None:
    writer = LineWriter(folder, "metrics")
    writer.append({"n": 1})
    writer.close()
    for name in ("metrics.jsonl.part", "metrics-000002.jsonl.tmp", "old-metrics.jsonl"):
        storage.write_bytes(f"{folder}/{name}", b'{"n": 2}\n')
    assert LineReader(folder, "metrics").new() == [{"n": 1}]


def test_a_run_that_moves_between_disk_and_bucket_keeps_its_lines(bucket: Bucket, tmp_path: Path) -> None:
    """In their order, whatever it was moved, and a reader that is there sees what is added."""
    places = [str(tmp_path / "run"), bucket.uri("run")] * 2
    for number, place in enumerate(places):
        if number:
            for name in storage.files(places[number - 1]):
                storage.write_bytes(f"{place}/{name}", storage.read_bytes(f"{places[number - 1]}/{name}"))
        writer, reader = LineWriter(place, "metrics"), LineReader(place, "metrics")
        assert [row["n"] for row in reader.new()] == [*range(2 * number)]
        for new in (2 * number, 2 * number + 1):
            writer.append({"n": new})
            writer.flush()
        writer.close()
        assert [row["n"] for row in reader.new()] == [2 * number, 2 * number + 1]


def test_damaged_lines_are_left_out(folder: str, caplog: pytest.LogCaptureFixture) -> None:
    """Half a line that another follows, and the zeros of a power cut: one warning names file and lines."""
    row = b'{"step": %d, "images": 8, "time_s": 0.0, "metrics": {"train/loss": %d}}\n'
    content = row % (1, 1) + b'{"step": 2, "im' + row % (2, 2) + bytes(40) + b"\nnull\n" + row % (3, 3)
    name = "metrics.jsonl" if storage.is_local(folder) else "metrics-000001.jsonl"
    storage.write_bytes(f"{folder}/run/{name}", content)
    assert losses(folder) == {1: 1.0, 3: 3.0}
    assert f"{folder}/run/{name}: line 2, 3, 4 was damaged" in caplog.text
    assert len(caplog.records) == 1


def test_damaged_lines_have_their_numbers_in_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also those that are read later; three are named, the others counted."""
    file, reader = tmp_path / "metrics.jsonl", LineReader(str(tmp_path), "metrics")
    file.write_text('{"n": 1}\nhalf\n')
    assert reader.new() == [{"n": 1}]
    with file.open("a") as more:
        more.write("half\n" * 5 + '{"n": 2}\n')
    assert reader.new() == [{"n": 2}]
    first, second = (record.getMessage() for record in caplog.records)
    assert "metrics.jsonl: line 2 was damaged" in first
    assert "metrics.jsonl: line 3, 4, 5 and 2 more was damaged" in second


def test_a_full_disk_leaves_no_half_line(tmp_path: Path) -> None:
    """And a line of the log that finds no room ends no training."""
    writer, log_file = LineWriter(str(tmp_path), "metrics"), LogFile(str(tmp_path))
    writer.append({"n": 1})
    size = (tmp_path / "metrics.jsonl").stat().st_size
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 5, limit[1]))
    try:
        with pytest.raises(OSError, match=r"no space left for metrics\.jsonl"):
            writer.append({"n": 2})
        log_file.handle(logging.makeLogRecord({"msg": "full"}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, ignored)
    assert (tmp_path / "metrics.jsonl").stat().st_size == size
    writer.append({"n": 3})
    assert [row["n"] for row in LineReader(str(tmp_path), "metrics").new()] == [1, 3]
    log_file.handle(logging.makeLogRecord({"msg": "room again"}))
    log_file.close()
    assert [row["line"] for row in LineReader(str(tmp_path), "log").new()] == ["room again"]


def test_a_log_is_uploaded_by_time_and_never_ends_training(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logging makes no request; lines that S3 refused come with the next flush."""
    monkeypatch.setattr(metrics_file, "SEGMENT_S", 0.2)
    logger, handler = logging.getLogger("test.log"), LogFile(bucket.uri("run"))
    logger.addHandler(handler)
    logger.propagate = False
    reader = LineReader(bucket.uri("run"), "log")
    bucket.proxy.requests.clear()
    with bucket.failing("busy"):
        logger.warning("while S3 is away")
        assert not bucket.proxy.requests
        while not bucket.proxy.requests:
            time.sleep(0.05)
    logger.warning("later")
    deadline, lines = time.monotonic() + 20, []
    while len(lines) < 2 and time.monotonic() < deadline:
        lines += [row["line"] for row in reader.new()]
        time.sleep(0.05)
    assert lines == ["while S3 is away", "later"]
    logger.warning("last")
    logger.removeHandler(handler)
    handler.close()
    assert [row["line"] for row in reader.new()] == ["last"]


def test_a_log_that_is_not_uploaded_at_the_end_ends_nothing(bucket: Bucket) -> None:
    handler = LogFile(bucket.uri("run"))
    handler.handle(logging.makeLogRecord({"msg": "last"}))
    bucket.proxy.requests.clear()
    with bucket.failing("busy"):
        handler.close()
        assert bucket.proxy.requests


def test_who_was_asked_to_stop_does_not_forget_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk is looked at more often than a bucket, where each look costs."""
    assert poll_s(str(tmp_path)) < poll_s("s3://bucket/run")
    monkeypatch.setattr(metrics_file, "POLL_S", 0.0)
    own = RunDir(str(tmp_path))
    asked = asked_by(own)
    assert not asked()
    own.ask_to_stop()
    assert asked()
    storage.delete(own.stop)
    assert asked()

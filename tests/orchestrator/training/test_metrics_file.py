"""Reports that survive kills, in files that grow and, on S3, in segments."""

import itertools
import json
import math
from pathlib import Path

import pytest

from orchestrator import storage
from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.training import metrics_file
from orchestrator.training.metrics_file import LineReader, LineWriter, MetricsWriter, read_metrics
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


def test_segments_are_uploaded_now_and_then(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver sees reports between checkpoints too."""
    folder = bucket.uri("run")
    writer = LineWriter(folder, "metrics")
    writer.append({"n": 1})
    assert LineReader(folder, "metrics").new() == []
    monkeypatch.setattr(metrics_file, "SEGMENT_S", 0.0)
    writer.append({"n": 2})
    assert LineReader(folder, "metrics").new() == [{"n": 1}, {"n": 2}]

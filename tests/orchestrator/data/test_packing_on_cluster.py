"""From a bucket into a bucket, by tasks of a cluster that learns of the bucket from its environment."""

import logging
from pathlib import Path

import pytest
import ray

from jobs.pack_shards import on_cluster
from orchestrator import storage
from orchestrator.data import packing
from orchestrator.data.manifest import open_manifest
from orchestrator.data.packing import pack
from orchestrator.data.sources import open_source
from tests.orchestrator.data.foreign import samples, tar


def test_s3(bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "ROWS_PER_SHARD", 8)
    for name, first, count in (("train-0.tar", 0, 30), ("val-0.tar", 30, 10)):
        path = tar(tmp_path / "tars" / name, samples(first, count))
        storage.write_bytes(bucket.uri("tars", name), path.read_bytes())
    ray.init(address="local", num_cpus=2, logging_level=logging.ERROR, log_to_driver=False)
    try:
        source = open_source(f"webdataset:{bucket.uri('tars')}", execute=on_cluster)
        report = pack(bucket.uri("out"), source, execute=on_cluster)
    finally:
        ray.shutdown()
    here = pack(str(tmp_path / "out"), open_source(f"webdataset:{tmp_path}/tars"))
    assert report == here
    assert open_manifest(bucket.uri("out")) == report.manifest
    assert [shard.rows for shard in report.manifest.splits["train"]] == [8, 8, 8, 6]

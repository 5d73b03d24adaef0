"""From a bucket into a bucket, by tasks of a cluster that learns of the bucket from its environment."""

from pathlib import Path

import pytest

from jobs.pack_shards import on_cluster
from orchestrator import storage
from orchestrator.data import packing
from orchestrator.data.manifest import open_manifest
from orchestrator.data.packing import pack
from orchestrator.data.sources import open_source
from tests.orchestrator.data.foreign import samples, tar
from tests.parts import start_ray


@pytest.mark.smoke
def test_s3(no_cluster, bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "ROWS_PER_SHARD", 8)
    for name, first, count in (("train-0.tar", 0, 30), ("val-0.tar", 30, 10)):
        path = tar(tmp_path / "tars" / name, samples(first, count))
        storage.write_bytes(bucket.uri("tars", name), path.read_bytes())
    start_ray()
    source = open_source(f"webdataset:{bucket.uri('tars')}", execute=on_cluster)
    report = pack(bucket.uri("out"), source, execute=on_cluster)
    here = pack(str(tmp_path / "out"), open_source(f"webdataset:{tmp_path}/tars"))
    assert report == here
    assert open_manifest(bucket.uri("out")) == report.manifest
    assert [shard.rows for shard in report.manifest.splits["train"]] == [8, 8, 8, 6]

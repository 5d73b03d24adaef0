"""The pool of actors: how large it may be, and what is said when a part cannot be done."""

from pathlib import Path

import pytest

from moe.overrides import RoutingOverrides
from orchestrator.errors import UsageError
from orchestrator.prediction.inputs import open_inputs
from orchestrator.prediction.predictor import Settings
from orchestrator.prediction.run import pool_size, run
from tests.orchestrator.prediction.models import exported

pytestmark = pytest.mark.slow


def test_the_pool_and_what_went_wrong_in_it(cluster, tmp_path, pack_greys):
    """One Ray for all of it. A part that fails is the error that it raised, without what Ray wraps it in."""
    assert pool_size(None) == (2, {"num_cpus": 1.0})
    assert pool_size(1) == (1, {"num_cpus": 1.0})
    with pytest.raises(UsageError, match="--workers 3: each takes one of the 2 CPUs of the cluster"):
        pool_size(3)

    path, _ = pack_greys(train=8)
    parts = dict(enumerate(open_inputs(path, None, cache_bytes=10**9).parts(3)))
    settings = Settings(
        model=exported(tmp_path / "model.safetensors"),
        point=RoutingOverrides(),
        out=str(tmp_path / "out"),
        batch_size=2,
        threads=1,
        classes=None,
    )
    done = sorted(run(parts, settings, workers=2, each={"num_cpus": 1.0}))
    assert [(part, images) for part, images, _ in done] == [(0, 3), (1, 3), (2, 2), (3, 3)]
    assert len(list((tmp_path / "out").iterdir())) == 4

    shard = next(Path(path).glob("val/*.parquet"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"!")
    with pytest.raises(UsageError, match=shard.name):
        list(run(parts, settings, workers=1, each={"num_cpus": 1.0}))

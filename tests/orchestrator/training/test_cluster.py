"""What the cluster can hold: what is up, or what it says it may bring up."""

import json

import pytest

from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.errors import UsageError
from orchestrator.training.resources import DECLARED, check_resources, most_resources, placement

pytestmark = pytest.mark.usefixtures("cluster")  # of two CPUs


def test_what_is_declared_counts_where_it_is_more(monkeypatch):
    assert most_resources()["CPU"] == 2
    monkeypatch.setenv(DECLARED, json.dumps({"CPU": 1, "GPU": 4}))
    assert most_resources()["CPU"] == 2
    assert most_resources()["GPU"] == 4


def test_a_sweep_may_begin_before_its_nodes_are_up(monkeypatch):
    run = override(RunConfig(), {"scale.workers": 4, "scale.use_gpu": True})
    with pytest.raises(UsageError, match="4 workers need 4 GPUs, the cluster has at most 0"):
        check_resources(run)
    monkeypatch.setenv(DECLARED, json.dumps({"CPU": 8, "GPU": 4}))
    check_resources(run)


def test_gpus_are_kept_together_and_cores_are_not_shared():
    assert placement(override(RunConfig(), {"scale.use_gpu": True})) == "PACK"
    assert placement(RunConfig()) == "SPREAD"

"""Resources that runs need and that the cluster has or declares; answers of its nodes."""

import json
import time

import pytest
import ray

from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.errors import UsageError
from orchestrator.training import resources
from orchestrator.training.resources import (
    DECLARED,
    check_resources,
    most_resources,
    on_every_node,
    placement,
    run_resources,
)

pytestmark = pytest.mark.usefixtures("cluster")  # of two CPUs
GPUS = override(RunConfig(), {"scale.workers": 4, "scale.use_gpu": True})


def test_the_declared_maximum_counts_where_it_is_larger(monkeypatch):
    assert most_resources()["CPU"] == 2
    monkeypatch.setenv(DECLARED, json.dumps({"CPU": 1, "GPU": 4}))
    assert (most_resources()["CPU"], most_resources()["GPU"]) == (2, 4)


def test_too_many_workers_are_refused_with_the_arithmetic(monkeypatch):
    with pytest.raises(
        UsageError, match=r"4 workers x 0.5 CPU \+ 1 CPU for data = 3 CPUs, .* at most 2: use at most 2"
    ):
        check_resources(override(RunConfig(), {"scale.workers": 4}))
    with pytest.raises(UsageError, match="4 workers need 4 GPUs, the cluster has at most 0"):
        check_resources(GPUS)
    monkeypatch.setenv(DECLARED, json.dumps({"CPU": 8, "GPU": 4}))
    check_resources(GPUS)  # before its nodes are up


@pytest.mark.parametrize(
    ("workers", "use_gpu", "inline", "need"),
    [
        (1, False, True, {"CPU": 1}),
        (2, False, False, {"CPU": 2}),
        (1, True, False, {"GPU": 1, "CPU": 2}),
        (4, True, False, {"GPU": 4, "CPU": 5}),
    ],
)
def test_only_one_worker_without_a_gpu_reads_its_own_data(workers, use_gpu, inline, need):
    run = override(RunConfig(), {"scale.workers": workers, "scale.use_gpu": use_gpu})
    assert run.inline == inline
    assert run_resources(run) == need


def test_nodes_that_do_not_answer_share_one_time_limit(monkeypatch):
    (node,) = ray.nodes()
    patience, answer = [], resources._answer
    monkeypatch.setattr(resources, "ANSWER_S", 1.0)
    monkeypatch.setattr(resources, "_answer", lambda ref, s: patience.append(s) or answer(ref, s))
    monkeypatch.setattr(resources.ray, "nodes", lambda: [node | {"NodeName": f"node {n}"} for n in range(3)])

    def hang() -> None:
        time.sleep(4)

    answers = on_every_node(hang)
    assert list(map(repr, answers.values())) == ["TimeoutError('no answer within 1 s')"] * 3
    assert sum(patience) < 1.5


def test_gpus_are_kept_together_and_cores_are_not_shared():
    assert (placement(GPUS), placement(RunConfig())) == ("PACK", "SPREAD")

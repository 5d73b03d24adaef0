"""The network that workers use, and what becomes of workers that could not be connected."""

import os
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
import torch.distributed as dist
from ray._private.services import canonicalize_bootstrap_address_or_die
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback

from orchestrator.training import torch_trainer


def test_workers_that_cannot_be_connected_free_their_devices():
    """Else the next attempt waits for ever for what Ray still reserves."""
    freed = []
    unconnected: Any = SimpleNamespace(shutdown=lambda: freed.append("all"))
    config = torch_trainer.ConnectConfig(backend="gloo")
    with pytest.raises(AttributeError):
        config.backend_cls().on_start(unconnected, config)
    assert freed == ["all"]


class _Here(list[Any]):
    """A group of workers that all are this process."""

    def execute_async(self, function: Any, **options: Any) -> list[Any]:
        return [function(**options)]


def test_a_group_that_ends_leaves_a_training_its_process_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray's own backend destroys it beside the training: sums over workers then are shares of one worker."""
    monkeypatch.setattr(ray, "get", lambda results, **_: results)
    workers: Any = _Here([0, 1])
    config = torch_trainer.ConnectConfig(backend="gloo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        config.backend_cls().on_shutdown(workers, config)
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_gloo_and_nccl_use_the_interface_of_ray(monkeypatch):
    """Unless the user chose another one, or none has Ray's address."""
    (link,) = (name for name, all in psutil.net_if_addrs().items() if "127.0.0.1" in [a.address for a in all])
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    chosen = []
    for address, gloo in (("127.0.0.1", ""), ("127.0.0.1", "eth7"), ("192.0.2.1", "")):
        monkeypatch.setattr(torch_trainer.ray.util, "get_node_ip_address", lambda address=address: address)
        monkeypatch.setattr(os, "environ", {names[0]: gloo} if gloo else {})
        torch_trainer.use_interface_of_ray()
        chosen.append(tuple(map(os.environ.get, names)))
    assert chosen == [(link, f"={link}"), ("eth7", f"={link}"), (None, None)]


@pytest.mark.smoke
@pytest.mark.usefixtures("cluster")
def test_another_cluster_on_the_machine_does_not_end_a_training(monkeypatch):
    """Ray's cleaner asks the newest one whether the controller lives, and frees the workers of an unknown."""
    callbacks = torch_trainer.Trainer(print)._create_default_callbacks()
    cleaner: Any = next(each for each in callbacks if isinstance(each, PlacementGroupCleanerCallback))

    class Asker:
        def cluster(self) -> str:
            return canonicalize_bootstrap_address_or_die("auto")

    def start(cleaner: Any, context: None) -> None:
        other = {"env_vars": {"RAY_ADDRESS": "192.0.2.1:6379"}}
        cleaner._cleaner = ray.remote(Asker).options(num_cpus=0, runtime_env=other).remote()

    monkeypatch.setattr(PlacementGroupCleanerCallback, "after_controller_start", start)
    cleaner.after_controller_start(None)
    assert ray.get(cleaner._cleaner.cluster.remote()) == ray.get_runtime_context().gcs_address

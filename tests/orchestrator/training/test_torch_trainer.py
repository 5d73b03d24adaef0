"""The network that workers use, and what becomes of workers that could not be connected."""

import os
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
import torch.distributed as dist
from ray._private.state import actors
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.util.placement_group import placement_group, placement_group_table

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


class _OtherCluster(BaseHTTPRequestHandler):
    """Its dashboard, which knows no actor of ours."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"result": true, "data": {"result": {"result": []}}}')


class _Controller:
    def start(self, placement_group: Any) -> Any:
        callbacks = torch_trainer.Trainer(print)._create_default_callbacks()
        cleaner: Any = next(each for each in callbacks if isinstance(each, PlacementGroupCleanerCallback))
        context: Any = SimpleNamespace(run_id="a run")
        cleaner.after_controller_start(context)
        ray.get(cleaner._cleaner.register_placement_group.remote(placement_group))
        return cleaner._cleaner


@pytest.mark.smoke
@pytest.mark.usefixtures("cluster")
def test_workers_are_freed_when_their_controller_has_died_and_not_before():
    """Also if another cluster answers where Ray looks for the dashboard of this one."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _OtherCluster) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        elsewhere = {"env_vars": {"RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{server.server_port}"}}
        controller: Any = ray.remote(_Controller).options(num_cpus=0, runtime_env=elsewhere).remote()
        group = placement_group([{"CPU": 0.01}])
        cleaner = ray.get(controller.start.remote(group))
        time.sleep(5)
        assert placement_group_table(group)["state"] == "CREATED"
        ray.kill(controller)
        while placement_group_table(group)["state"] != "REMOVED":
            time.sleep(0.1)
        while actors(cleaner._actor_id.hex())["State"] != "DEAD":  # it ends after what it frees
            time.sleep(0.1)
        server.shutdown()

"""The network that workers use, and what becomes of workers that could not be connected."""

import os
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from orchestrator.training import torch_trainer


def test_workers_that_cannot_be_connected_free_their_devices():
    """Else the next attempt waits for ever for what Ray still reserves."""
    freed = []
    unconnected: Any = SimpleNamespace(shutdown=lambda: freed.append("all"))
    config = torch_trainer.ConnectConfig(backend="gloo")
    with pytest.raises(AttributeError):
        config.backend_cls().on_start(unconnected, config)
    assert freed == ["all"]


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

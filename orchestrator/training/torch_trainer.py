"""Ray Train's trainer for torch, with other signals, the network of Ray, and workers that can be freed."""

import os
from typing import Any

import psutil
import ray
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.torch.config import _TorchBackend
from ray.train.v2._internal.callbacks import DatasetsCallback, placement_group_callback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback

from orchestrator.training.cleaner import Cleaner


class Trainer(TorchTrainer):
    """Does not handle Ctrl-C, which Ray would turn into a failed training: the command handles it. Goes on
    when another Ray cluster starts on this machine.
    """

    def _create_default_callbacks(self) -> list[Any]:
        made = super()._create_default_callbacks()
        # That of data sets starts an actor, which serves those that a trainer is given: ours has none.
        replaced = (PlacementGroupCleanerCallback, DatasetsCallback)
        return [each for each in made if not isinstance(each, replaced)] + [_CleanerCallback()]

    def _register_sigint_handler(self, controller: Any) -> None:
        pass


class _CleanerCallback(PlacementGroupCleanerCallback):
    """Starts a `Cleaner` beside the controller, in place of Ray's."""

    def after_controller_start(self, train_run_context: Any) -> None:
        module: Any = placement_group_callback
        module.PlacementGroupCleaner = Cleaner
        super().after_controller_start(train_run_context)


class ConnectConfig(TorchConfig):
    """Connects the workers by `_Backend`."""

    @property
    def backend_cls(self) -> type[_TorchBackend]:
        return _Backend


class _Backend(_TorchBackend):
    """Connects workers by the network that Ray uses, until they end. It frees the devices of those that could
    not be connected, which Ray 2.60 reserves until its job ends: the next attempt would wait for ever.
    """

    def on_start(self, worker_group: Any, backend_config: TorchConfig) -> None:
        try:
            worker_group.execute(use_interface_of_ray)
            super().on_start(worker_group, backend_config)
        except Exception:
            worker_group.shutdown()
            raise

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        """Leaves the process group: Ray ends the processes next. It would destroy the group beside a training
        that still runs, and a worker without a group takes its own share of a sum for the whole.
        """


def use_interface_of_ray() -> None:
    """Lets gloo and NCCL use the interface that has Ray's address of this node, unless the user chose others.

    By itself, gloo listens on the address of the hostname, which is 127.0.1.1 in /etc/hosts of Debian and
    Ubuntu: other machines cannot reach it. Without such an interface, as behind a translated address, both
    choose for themselves.
    """
    node = ray.util.get_node_ip_address()
    for name, addresses in psutil.net_if_addrs().items():
        # A link-local IPv6 address ends in its interface: fe80::1%eth0.
        if node in (each.address.partition("%")[0] for each in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            # By default NCCL takes all names that begin like this, eth10 for eth1.
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")
            return

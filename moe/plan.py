"""Which (dp, ep) meshes a model can be split over, what a rank needs on each, and which one to take."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moe.cost import num_params
from moe.memory import memory_per_rank
from moe.parallel import ParallelConfig, check_layout
from moe.sharding import FP32, Step
from moe.traffic import Sent, traffic_per_rank
from moe.vit import ViTConfig

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Attributes:
    devices: one rank each.
    intra_gb_per_s, inter_gb_per_s: what a device can send to its own node and to others, in 1e9 bytes per
        second; the defaults are the nominal rates of an H100's NVLink and of 400 Gbit/s for each device.
    """

    devices: int
    devices_per_node: int = 8
    intra_gb_per_s: float = 450.0
    inter_gb_per_s: float = 50.0

    def __post_init__(self) -> None:
        for name in ("devices", "devices_per_node"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("intra_gb_per_s", "inter_gb_per_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")

    def seconds(self, sent: Sent) -> float:
        return sent.intra / (1e9 * self.intra_gb_per_s) + sent.inter / (1e9 * self.inter_gb_per_s)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A mesh, and what a rank of it needs for a step.

    Attributes:
    memory: bytes at the peak, by part.
    traffic: bytes sent, by collective and link.
    seconds: on the links, were nothing to travel while another collective or the model is busy.
    """

    dp: int
    ep: int
    memory: Mapping[str, float]
    traffic: Mapping[str, Sent]
    seconds: float

    def peak(self) -> float:
        return sum(self.memory.values())


def layouts(config: ViTConfig, step: Step, cluster: Cluster, options: ParallelConfig) -> list[Layout]:
    """Every mesh of all the devices that the model can be split over, by ep; a dense model has ep=1.

    Raises:
        ValueError: if there is none; it says why ep=1 is not one.
    """
    found, refused = [], None
    for ep in range(1, (config.moe.num_experts if config.moe else 1) + 1):
        if cluster.devices % ep:
            continue
        dp = cluster.devices // ep
        try:
            check_layout(config, dp=dp, ep=ep, dp_replicate=options.dp_replicate)
        except ValueError as error:
            refused = refused or error
            continue
        traffic = traffic_per_rank(
            config, step, dp=dp, ep=ep, devices_per_node=cluster.devices_per_node, options=options
        )
        layout = Layout(
            dp=dp,
            ep=ep,
            memory=memory_per_rank(config, step, dp=dp, ep=ep, options=options),
            traffic=traffic,
            seconds=sum(map(cluster.seconds, traffic.values())),
        )
        found.append(layout)
    if not found:
        raise ValueError(f"no ep splits the model over {cluster.devices} devices; ep=1: {refused}")
    return found


def choose(among: Sequence[Layout], *, memory: float | None = None) -> Layout:
    """The one that spends the least time on links, the smallest ep if several do; of those that need at
    most `memory` bytes, if that is given.

    Raises:
        ValueError: if none fits; it names the one that needs least, and ways out.
    """
    fitting = [layout for layout in among if memory is None or layout.peak() <= memory]
    if not fitting:
        best = min(among, key=Layout.peak)
        need, room, activations = (n / GIB for n in (best.peak(), memory or 0, best.memory["activations"]))
        raise ValueError(
            f"no layout fits {room:.1f} GiB; dp={best.dp}, ep={best.ep} needs {need:.1f}, {need - room:.1f}"
            f" too much: take more devices, or shrink its {activations:.1f} GiB of activations by a smaller"
            " train.microbatch, scale.activation_checkpointing=true or train.compute_dtype=bfloat16"
        )
    return min(fitting, key=lambda layout: (layout.seconds, layout.ep))


def choose_ep(
    config: ViTConfig,
    *,
    workers: int,
    images_per_rank: int,
    options: ParallelConfig,
    passes: int = 1,
    compute_bytes: int = FP32,
    devices_per_node: int = 8,
) -> int:
    """The ep of `choose` whatever the memory, for `images_per_rank` images per step, in `passes` passes.

    Raises:
        ValueError: as `layouts`.
    """
    step = Step(images=images_per_rank // passes, passes=passes, compute_bytes=compute_bytes)
    cluster = Cluster(devices=workers, devices_per_node=devices_per_node)
    return choose(layouts(config, step, cluster, options)).ep


def checkpoint_bytes(config: ViTConfig, *, moments: int) -> dict[str, int]:
    """Of the weights alone, and of a whole checkpoint with the optimiser's `moments` per parameter; both in
    float32, without the files' headers.
    """
    weights = FP32 * num_params(config)
    return {"weights": weights, "total": (1 + moments) * weights}

"""Estimates of a run, computed from its config alone: memory and communication per layout, time and disk.

As `moe.parallel` splits a model over a (dp, ep) mesh: dense parameters are sharded over all ranks of a copy
of the model, experts over ep (dim 0) and dp (dim 1). FSDP gathers, frees and reduces together the parameters
of a block's experts, its other parameters, and those outside of the blocks. ep neighbours are neighbouring
ranks. docs/planning.md compares the result with measurements.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd, prod
from typing import NamedTuple

from moe.cost import forward_gflops_2mac, model_costs, num_params, param_shapes, train_flops_6mac
from moe.experts import is_expert
from moe.layout import check_layout
from moe.model import begins_so, unit_shapes
from orchestrator.checkpoint.manifest import step_of
from orchestrator.config import RunConfig
from orchestrator.errors import UsageError

GIB = 2**30
FP32 = 4  # bytes
BYTES = {"float32": FP32, "bfloat16": 2}
MEMORY_FRAC = 0.9  # of a device; the allocator and the communication libraries need the rest
MEMORY_REMEDY = (
    "use more workers, a smaller train.microbatch, scale.activation_checkpointing=true or an optimizer with"
    " less state (train.optimizer.state_dtype=bfloat16, train.optimizer.kind=adafactor)"
)


@dataclass(frozen=True, kw_only=True)
class Links:
    """Bandwidth from a device to devices of its node and of other nodes, in 1e9 bytes per second.

    The defaults are nominal rates: NVLink of an H100, and 400 Gbit/s for each device.
    """

    intra_gb_per_s: float = 450.0
    inter_gb_per_s: float = 50.0

    def __post_init__(self) -> None:
        if not min(self.intra_gb_per_s, self.inter_gb_per_s) > 0:
            raise UsageError(f"the rates of links must be positive, got {self}")

    def seconds(self, sent: "Sent") -> float:
        return sent.intra / (1e9 * self.intra_gb_per_s) + sent.inter / (1e9 * self.inter_gb_per_s)


@dataclass(frozen=True)
class Sent:
    """Bytes that a rank sends per step to ranks of its node, and to ranks of other nodes."""

    intra: float
    inter: float

    def __add__(self, other: "Sent") -> "Sent":
        return Sent(self.intra + other.intra, self.inter + other.inter)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A (dp, ep) mesh, and the needs of one of its ranks for a training step.

    Attributes:
        memory: bytes at the peak, by part.
        traffic: by collective.
        seconds: on the links, if no collective overlaps with another one or with computation.
    """

    dp: int
    ep: int
    memory: Mapping[str, float]
    traffic: Mapping[str, Sent]
    seconds: float

    def peak(self) -> float:
        return sum(self.memory.values())


def layouts(run: RunConfig, links: Links = Links()) -> list[Layout]:
    """All meshes of the run's workers that its model can be split over, by ep; a dense model has ep=1.

    Raises:
        UsageError: if there is none.
    """
    model, workers, copies = run.model, run.scale.workers, run.scale.dp_replicate
    found, refused = [], None
    for ep in range(1, (model.moe.num_experts if model.moe else 1) + 1):
        if workers % ep:
            continue
        try:
            check_layout(model, dp=workers // ep, ep=ep, dp_replicate=copies)
        except ValueError as error:
            refused = refused or error
        else:
            found.append(layout(run, ep, links))
    if not found:
        raise UsageError(f"no ep splits the model over {workers} workers; ep=1: {refused}")
    return found


def layout(run: RunConfig, ep: int, links: Links = Links()) -> Layout:
    dp, traffic = run.scale.workers // ep, _traffic(run, ep)
    seconds = sum(map(links.seconds, traffic.values()))
    return Layout(dp=dp, ep=ep, memory=_memory(run, ep), traffic=traffic, seconds=seconds)


def choose(among: Sequence[Layout], *, memory_gib: float | None = None) -> Layout:
    """The layout with the least time on links that fits the memory; the smallest ep of several such layouts.

    Raises:
        UsageError: if none fits.
    """
    fitting = [each for each in among if memory_gib is None or each.peak() <= memory_gib * GIB]
    if not fitting:
        best = min(among, key=Layout.peak)
        raise UsageError(
            f"no layout fits {memory_gib:g} GiB; dp={best.dp}, ep={best.ep} needs {best.peak() / GIB:.1f},"
            f" of which {best.memory['activations'] / GIB:.1f} are activations: {MEMORY_REMEDY}"
        )
    return min(fitting, key=lambda each: (each.seconds, each.ep))


def resolve_auto(run: RunConfig) -> RunConfig:
    """The run with values for what is ``auto``, so that a run that is resumed goes on as it began: for
    `scale.ep` the choice of `choose`, whatever the memory, and for `train.compute_dtype` that of the devices.
    """
    scale, train = run.scale, run.train
    if scale.ep == "auto":
        scale = replace(scale, ep=choose(layouts(run)).ep)
    if train.compute_dtype == "auto":
        train = replace(train, compute_dtype=run.compute_dtype())
    same = scale is run.scale and train is run.train
    return run if same else replace(run, scale=scale, train=train)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Memory, time and disk of one trial.

    Attributes:
        memory_gib: of a device at the peak of a step.
        device_s: seconds of training times workers, without starts, evaluation and checkpoints.
        disk_bytes: of the checkpoints that the run keeps, at most.
    """

    family: str
    workers: int
    params: int
    forward_gflops_2mac: float
    train_flops_6mac: float
    memory_gib: float
    device_s: float
    disk_bytes: int


def estimate(run: RunConfig, *, flops_per_s: float) -> Estimate:
    """Estimates `run` on devices that reach `flops_per_s` of training FLOPs (6mac).

    A cooldown run trains only the steps after those of its base run.
    """
    flops = train_flops_6mac(run.model, (run.train.steps - branch_step(run)) * run.data.batch_size)
    return Estimate(
        family=run.model.family(),
        workers=run.scale.workers,
        params=num_params(run.model),
        forward_gflops_2mac=forward_gflops_2mac(run.model),
        train_flops_6mac=flops,
        memory_gib=layout(run, run.ep()).peak() / GIB,
        device_s=flops / flops_per_s,
        disk_bytes=checkpoints_kept(run) * checkpoint_bytes(run),
    )


def branch_step(run: RunConfig) -> int:
    """The step at which `run` leaves its trunk; 0 for a run without a trunk."""
    return (run.train.trunk and step_of(run.train.trunk)) or 0


def memory_problem(need_gib: float, have_gib: float) -> str:
    """Why a trial does not fit into the memory of a device; empty if it does."""
    if need_gib <= MEMORY_FRAC * have_gib:
        return ""
    return (
        f"needs {need_gib:.3g} GiB per device, and {MEMORY_FRAC:.0%} of its {have_gib:.3g} GiB are"
        f" {MEMORY_FRAC * have_gib:.3g}: {MEMORY_REMEDY}"
    )


def checkpoint_bytes(run: RunConfig) -> int:
    """Returns the bytes of weights and optimiser state in a checkpoint, without the files' headers."""
    return FP32 * num_params(run.model) + _moment_bytes(run, dp=1, ep=1)


def checkpoints_kept(run: RunConfig) -> int:
    """Upper bound on the checkpoints on disk after the run: newest, best, and multiples of `keep_every`."""
    steps, kept = run.train.steps, run.checkpoint
    evaluations, multiples = (steps // (n or steps + 1) for n in (run.train.eval_every, kept.keep_every))
    saved = -(-steps // run.save_every()) + multiples + min(kept.keep_best, evaluations)
    return min(saved, kept.keep_last + kept.keep_best + multiples)


class _Unit(NamedTuple):
    """Numbers of parameters that a rank holds of one block, or of everything outside of the blocks."""

    dense: int
    experts: int

    def gathered(self, dp: int, ep: int) -> int:
        """Numbers after gathering the shares of other ranks; a rank computes with its own experts only."""
        return self.dense * dp * ep + self.experts * dp


def _units(run: RunConfig, dp: int, ep: int, *, frozen: Sequence[str] = ()) -> list[_Unit]:
    """The unit outside of the blocks, then every block, on the first rank, with FSDP's padding; without what
    is frozen.
    """
    held = []
    for shapes in unit_shapes(run.model):
        numbers = [0, 0]
        for name, shape in shapes.items():
            if not begins_so(name, frozen):
                numbers[is_expert(name)] += prod(_shard(name, shape, dp, ep))
        held.append(_Unit(*numbers))
    return held


def _shard(name: str, shape: Sequence[int], dp: int, ep: int) -> list[int]:
    """The shape of a parameter on the first rank."""
    if is_expert(name):
        return [shape[0] // ep, shape[1] // dp, *shape[2:]]
    return [-(-shape[0] // (dp * ep)), *shape[1:]]


def _passes(run: RunConfig) -> int:
    """Forward and backward passes of a worker per update."""
    return run.data.batch_size // run.scale.workers // run.images_per_pass()


def _compute_bytes(run: RunConfig) -> int:
    return BYTES[run.compute_dtype()]


def _moment_bytes(run: RunConfig, dp: int, ep: int) -> int:
    """Returns the bytes that the optimiser keeps on the first rank, with the average of the weights."""
    average = FP32 if run.train.ema else 0
    found = 0
    for name, shape in param_shapes(run.model).items():
        if not begins_so(name, run.train.freeze):
            held = _shard(name, shape, dp, ep)
            found += run.train.optimizer.state_bytes(shape, held, expert=is_expert(name))
            found += average * prod(held)
    return found


def _memory(run: RunConfig, ep: int) -> dict[str, float]:
    """Bytes of a rank at the peak of a step, by part: in a backward pass that begins, or at the update.

    ``buffers`` are gathered weights, gradients that are being reduced, and gradients of activations. Not
    counted: the loss, temporaries of an operation, fragmentation, communication libraries.
    """
    scale, images, number, frozen = run.scale, run.images_per_pass(), _compute_bytes(run), run.train.freeze
    dp, accumulates = scale.workers // ep // scale.dp_replicate, _passes(run) > 1
    root, *blocks = units = _units(run, dp, ep)
    trained = _units(run, dp, ep, frozen=frozen)
    held = sum(map(sum, units))
    own: float = FP32 * held
    # One worker keeps copies in the type that it computes in.
    parameters = own + (number * held if scale.workers == 1 and number < FP32 else 0)
    last = max(trained[1:], key=lambda unit: unit.gathered(dp, ep))
    last_gathered, everything = last.gathered(dp, ep), sum(unit.gathered(dp, ep) for unit in units)
    gradients = sum(unit.gathered(dp, ep) for unit in trained) if accumulates else sum(last)

    kept, *others = model_costs(run.model, number=number, frozen=frozen).activations
    outside, *saved = (images * size for size in kept)
    stream, widest = (images * size for size in others)
    backward = {
        "gradients": FP32 * float(gradients),
        "activations": outside + sum(saved),
        "buffers": stream + widest,
    }
    if scale.activation_checkpointing:
        backward["activations"] = outside + len(saved) * stream + max(saved)
    if scale.workers > 1:
        dense = max(unit.dense for unit in blocks) * dp * ep  # of the next block, which arrives early
        keeps_all = accumulates or not scale.reshard_after_forward
        weights = everything if keeps_all else root.gathered(dp, ep) + last_gathered + dense
        backward["buffers"] = number * weights + max(
            backward["buffers"] + number * last_gathered / 2,  # half of the block's gradients are there
            number * 2 * last.experts * dp if dp > 1 else 0,  # sharded experts arrive, and are put together
            FP32 * last_gathered,  # gradients that are reduced
        )
    update = {"gradients": FP32 * float(sum(map(sum, trained))), "activations": 0.0, "buffers": 0.0}
    peak = max(backward, update, key=lambda part: sum(part.values()))
    return {"parameters": parameters, "optimizer": _moment_bytes(run, dp, ep)} | peak


def _traffic(run: RunConfig, ep: int) -> dict[str, Sent]:
    """Bytes that a rank sends to other ranks per step, by collective.

    ``all_to_all``: the rows of every MoE layer travel to their experts and back, so do their gradients, and
    with activation checkpointing the rows a second time. ``all_gather``: weights of blocks are gathered
    forward and, if they are trained, backward, unless a pass kept them for the next; all others once.
    ``reduce_scatter``, and ``all_reduce`` over copies of the model: float32 gradients, once. Not counted:
    gradient norms, metrics, column sums of Adafactor.
    """
    model, scale, number, passes = run.model, run.scale, _compute_bytes(run), _passes(run)
    dp, node = scale.workers // ep // scale.dp_replicate, min(scale.workers_per_node, scale.workers)
    every, trained = (_units(run, dp, ep, frozen=names) for names in ((), run.train.freeze))
    again = passes if scale.reshard_after_forward else 0
    gathered = [sum(unit[i] for unit in every) + again * sum(unit[i] for unit in trained[1:]) for i in (0, 1)]
    dense, experts = (sum(unit[i] for unit in trained) for i in (0, 1))
    exchanges = 6 if scale.activation_checkpointing else 4
    # The widths of all MoE layers.
    widths = sum(
        shape[1] for name, shape in param_shapes(model).items() if name.endswith(".experts.w_in_EDF")
    )
    sent = run.images_per_pass() * passes * model.expert_rows() * widths if model.moe else 0
    all_ranks, same_experts = _Group(dp * ep, 1, node), _Group(dp, ep, node)
    copies = _Group(scale.dp_replicate, dp * ep, node)
    return {
        "all_to_all": _Group(ep, 1, node).exchange(number * exchanges * sent),
        "all_gather": all_ranks.gather(number * gathered[0]) + same_experts.gather(number * gathered[1]),
        "reduce_scatter": all_ranks.gather(FP32 * dense) + same_experts.gather(FP32 * experts),
        "all_reduce": copies.gather(2 * FP32 * (dense + experts) / scale.dp_replicate),
    }


class _Group(NamedTuple):
    """Ranks that are `stride` apart, `node` devices to a node."""

    size: int
    stride: int
    node: int

    def mates(self) -> int:
        """Lower bound on the number of group members on one node, including the rank itself."""
        return 1 if self.node % self.stride else gcd(self.size, self.node // self.stride)

    def exchange(self, whole: float) -> Sent:
        """All-to-all of `whole` bytes: an equal part for every member, itself included."""
        part, mates = whole / self.size, self.mates()
        return Sent(intra=(mates - 1) * part, inter=(self.size - mates) * part)

    def gather(self, share: float) -> Sent:
        """All-gather of `share` bytes of every member: between nodes first, then within each node.

        A byte enters a node once. A reduce-scatter that ends with `share` bytes goes the way back.
        """
        nodes = self.size // self.mates()
        return Sent(intra=(self.size - nodes) * share, inter=(nodes - 1) * share)

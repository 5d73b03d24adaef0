"""Plan how a model is split over devices: memory and traffic of a rank on every layout, and the best layout.

  python jobs/plan.py soft-B/16-128e --devices 64 --set data.batch_size=1024
  python jobs/plan.py --set model.moe.router.kind=soft --set train.compute_dtype=float32

Computed from the config: nothing is trained and no weights are made. docs/planning.md has the formulae, and
how far they were from measured memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jobs._cli import command
from jobs._flags import PLUGIN, assignment, flag, parse
from jobs.train import preset
from orchestrator.errors import UsageError

if TYPE_CHECKING:
    from orchestrator.config import RunConfig
    from orchestrator.sweeps.estimate import Layout

CONVENTIONS = """\
GiB: 2^30 bytes of tensors at the peak of a step, by part; add a tenth for the allocator.
GB: 1e9 bytes that a rank sends per step, inside its node | to other nodes.
link s: at the links' nominal rates, without overlap of collectives with each other or with computation."""


@dataclass(frozen=True, kw_only=True)
class PlanFlags:
    model: str = flag(
        "debug", "by name, e.g. soft-S/16-128e; an unknown name lists all", positional=True, nargs="?"
    )
    devices: int = flag(8, "GPUs, with a worker each")
    devices_per_node: int = flag(8, "devices of a node")
    memory: float = flag(80.0, "memory of a device", metavar="GIB")
    intra: float = flag(450.0, "rate from a device to its node", metavar="GB_PER_S")
    inter: float = flag(50.0, "rate from a device to other nodes", metavar="GB_PER_S")
    set: tuple[tuple[str, Any], ...] = flag(
        (),
        "any field of train.py, e.g. train.microbatch=8 (repeatable)",
        metavar="FIELD=VALUE",
        read=assignment,
        nargs="+",
    )
    plugin: tuple[str, ...] = PLUGIN


def plan(flags: PlanFlags) -> None:
    """Prints the plan.

    Raises:
        UsageError: after the tables, if no layout fits the memory.
    """
    from orchestrator.sweeps.estimate import Links, choose, layouts, resolve_auto

    run = planned_run(flags)
    found = layouts(run, Links(intra_gb_per_s=flags.intra, inter_gb_per_s=flags.inter))
    print(
        f"{summary(run)}\n\n{memory_table(found, flags.memory)}\n\n{traffic_table(found)}\n\n{CONVENTIONS}\n"
    )
    chosen, auto = choose(found, memory_gib=flags.memory), resolve_auto(run).ep()
    print(f"chosen: dp={chosen.dp}, ep={chosen.ep}, least time on links among the layouts that fit")
    if auto != chosen.ep:
        print(f"scale.ep=auto ignores memory and --intra, --inter: it takes {auto}; set scale.ep={chosen.ep}")


def planned_run(flags: PlanFlags) -> RunConfig:
    """The run of `train.py` with as many workers as devices."""
    from orchestrator.codec import override
    from orchestrator.config import RunConfig

    model = preset(flags.model)
    assigned = dict(flags.set)
    for field, instead in {
        "scale.workers": "use --devices",
        "scale.workers_per_node": "use --devices-per-node",
        "scale.ep": "every ep is planned",
    }.items():
        if field in assigned:
            raise UsageError(f"--set {field}: {instead}")
    mesh = {
        "scale.workers": flags.devices,
        "scale.workers_per_node": flags.devices_per_node,
        "scale.ep": "auto",
    }
    return override(RunConfig(model=model), {"scale.use_gpu": True} | assigned | mesh)


def summary(run: RunConfig) -> str:
    from moe.cost import num_expert_params, num_params
    from orchestrator.sweeps.estimate import FP32, checkpoint_bytes

    params, experts, images = num_params(run.model), num_expert_params(run.model), run.images_per_pass()
    return (
        f"{params / 1e6:.1f}M parameters, {experts / 1e6:.1f}M of them in experts; a checkpoint is"
        f" {checkpoint_bytes(run) / 1e9:.2f} GB, its weights alone {FP32 * params / 1e9:.2f} GB\n"
        f"a step of a rank: {run.data.batch_size // run.scale.workers // images} x {images} images,"
        f" {run.compute_dtype()}, {run.train.optimizer.kind}, {run.scale.workers} devices,"
        f" {run.scale.workers_per_node} to a node"
    )


def memory_table(found: Sequence[Layout], memory_gib: float) -> str:
    from orchestrator.sweeps.estimate import GIB

    lines = [f"{'GiB':<5}{'dp':>5}{'ep':>5}{''.join(f'{part:>12}' for part in found[0].memory)}{'peak':>9}"]
    for layout in found:
        parts = "".join(f"{size / GIB:12.2f}" for size in layout.memory.values())
        fits = "fits" if layout.peak() <= memory_gib * GIB else "does not fit"
        lines.append(f"{layout.dp:10}{layout.ep:5}{parts}{layout.peak() / GIB:9.2f}  {fits}")
    return "\n".join(lines)


def traffic_table(found: Sequence[Layout]) -> str:
    from orchestrator.sweeps.estimate import Sent

    names = "".join(f"{name:>17}" for name in (*found[0].traffic, "sum"))
    lines = [f"{'GB':<5}{'dp':>5}{'ep':>5}{names}{'link s':>9}"]
    for layout in found:
        sent = (*layout.traffic.values(), sum(layout.traffic.values(), Sent(0, 0)))
        cells = "".join(f"{f'{one.intra / 1e9:.2f} | {one.inter / 1e9:.2f}':>17}" for one in sent)
        lines.append(f"{layout.dp:10}{layout.ep:5}{cells}{layout.seconds:9.4f}")
    return "\n".join(lines)


def main() -> None:
    flags = parse(PlanFlags, __doc__, epilog=f"{CONVENTIONS}\nExit code 1 if no layout fits.")
    with command(f"planning {flags.model} on {flags.devices} devices", plugins=flags.plugin):
        plan(flags)


if __name__ == "__main__":
    main()

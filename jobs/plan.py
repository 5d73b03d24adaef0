"""Plan how a model is split over devices: memory and traffic of a rank on every layout, and which to take.

  python jobs/plan.py soft-B/16-128e --devices 64 --set data.batch_size=1024
  python jobs/plan.py --set model.moe.router.kind=soft --set train.compute_dtype=bfloat16

Computed from the config: nothing is trained and no weights are made. Formulae, and how far they were from
measured memory: docs/planning.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from jobs.usage import assignment, command, plain_parser
from orchestrator.errors import UsageError

if TYPE_CHECKING:
    from moe.plan import Layout
    from moe.sharding import Step
    from orchestrator.config import RunConfig

COLLECTIVES = ("all_to_all", "all_gather", "reduce_scatter", "all_reduce")
CONVENTIONS = """\
GiB: 2^30 bytes of tensors at the worst moment of a step, by part; leave a tenth for the allocator.
GB: 1e9 bytes that a rank sends per step, inside its node | to other nodes.
link s: at the links' nominal rates, one collective after another, none of them behind computation."""


def plan(args: argparse.Namespace) -> None:
    """Prints the plan.

    Raises:
        UsageError: after the tables, if no layout fits the memory.
    """
    from moe.plan import GIB, Cluster, choose, layouts
    from orchestrator.sweeps.budget import step_of

    run, memory = planned_run(args), args.memory * GIB
    step = step_of(run)
    try:
        cluster = Cluster(
            devices=args.devices,
            devices_per_node=args.devices_per_node,
            intra_gb_per_s=args.intra,
            inter_gb_per_s=args.inter,
        )
        found = layouts(run.model, step, cluster, run.scale)
        print(f"{summary(run, step)}\n\n{memory_table(found, memory)}\n\n{traffic_table(found)}\n")
        print(f"{CONVENTIONS}\n", flush=True)
        chosen = choose(found, memory=memory)
    except ValueError as error:
        raise UsageError(str(error)) from None
    print(f"chosen: dp={chosen.dp}, ep={chosen.ep}, least time on the links of those that fit")
    if run.ep() != chosen.ep:
        print(
            f"scale.ep=auto knows neither memory nor rates and takes ep={run.ep()}: set scale.ep={chosen.ep}"
        )


def planned_run(args: argparse.Namespace) -> RunConfig:
    """The run of `train.py` with as many workers as devices."""
    from moe.presets import PRESETS
    from orchestrator.codec import override
    from orchestrator.config import RunConfig

    if args.model not in PRESETS:
        raise UsageError(f"unknown model {args.model!r}; known: {', '.join(PRESETS)}")
    assigned = dict(map(assignment, args.set))
    taken = {
        "scale.workers": (args.devices, "use --devices"),
        "scale.workers_per_node": (args.devices_per_node, "use --devices-per-node"),
        "scale.ep": ("auto", "every ep is planned"),
    }
    for field, (_, instead) in taken.items():
        if field in assigned:
            raise UsageError(f"--set {field}: {instead}")
    mesh = {field: value for field, (value, _) in taken.items()}
    return override(RunConfig(model=PRESETS[args.model]), assigned | mesh)


def summary(run: RunConfig, step: Step) -> str:
    from moe.cost import num_expert_params, num_params
    from moe.plan import checkpoint_bytes

    size = checkpoint_bytes(run.model, moments=step.moments)
    return (
        f"{num_params(run.model) / 1e6:.1f}M parameters, {num_expert_params(run.model) / 1e6:.1f}M of them in"
        f" experts; a checkpoint is {size['total'] / 1e9:.2f} GB, its weights alone"
        f" {size['weights'] / 1e9:.2f} GB\n"
        f"a step of a rank: {step.passes} x {step.images} images, {run.train.compute_dtype},"
        f" {run.train.optimizer.kind}, {run.scale.workers} devices, {run.scale.workers_per_node} to a node"
    )


def memory_table(found: Sequence[Layout], memory: float) -> str:
    from moe.plan import GIB

    parts = "".join(f"{part:>12}" for part in found[0].memory)
    lines = [f"{'GiB':<5}{'dp':>5}{'ep':>5}{parts}{'peak':>9}"]
    for layout in found:
        parts = "".join(f"{size / GIB:12.2f}" for size in layout.memory.values())
        fits = "fits" if layout.peak() <= memory else "does not fit"
        lines.append(f"{layout.dp:10}{layout.ep:5}{parts}{layout.peak() / GIB:9.2f}  {fits}")
    return "\n".join(lines)


def traffic_table(found: Sequence[Layout]) -> str:
    names = "".join(f"{name:>17}" for name in (*COLLECTIVES, "sum"))
    lines = [f"{'GB':<5}{'dp':>5}{'ep':>5}{names}{'link s':>9}"]
    for layout in found:
        sent = [total(b for name, b in layout.traffic.items() if name.startswith(c)) for c in COLLECTIVES]
        gigabytes = (f"{intra / 1e9:.2f} | {inter / 1e9:.2f}" for intra, inter in (*sent, total(sent)))
        cells = "".join(f"{cell:>17}" for cell in gigabytes)
        lines.append(f"{layout.dp:10}{layout.ep:5}{cells}{layout.seconds:9.4f}")
    return "\n".join(lines)


def total(sent: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Adds up what several collectives send, in bytes: inside the node, and to other nodes."""
    intra, inter = map(sum, zip(*sent, strict=True))
    return intra, inter


def main() -> None:
    parser = plain_parser(__doc__, epilog=f"{CONVENTIONS}\nExit code 1 if no layout fits.")
    parser.add_argument(
        "model",
        nargs="?",
        default="debug",
        metavar="MODEL",
        help="by name, e.g. soft-S/16-128e; an unknown name lists all (%(default)s)",
    )
    parser.add_argument("--devices", type=int, default=8, help="with a worker each (%(default)s)")
    parser.add_argument("--devices-per-node", type=int, default=8, help="(%(default)s)")
    parser.add_argument("--memory", type=float, default=80.0, metavar="GIB", help="of a device (%(default)s)")
    rate = {"type": float, "metavar": "GB_PER_S"}
    parser.add_argument("--intra", default=450.0, help="from a device to its node (%(default)s)", **rate)
    parser.add_argument("--inter", default=50.0, help="from a device to other nodes (%(default)s)", **rate)
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="any field that train.py knows, e.g. train.microbatch=8 (repeatable)",
    )
    args = parser.parse_args()
    with command(f"planning {args.model} on {args.devices} devices"):
        plan(args)


if __name__ == "__main__":
    main()

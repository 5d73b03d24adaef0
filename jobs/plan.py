"""Plan how a model is split over devices, try a layout, compute what models cost, or check a sweep.

  python jobs/plan.py soft-B/16-128e --devices 64 --set data.batch_size=1024
  python jobs/plan.py --set model.moe.router.kind=soft --set train.compute_dtype=float32
  python jobs/plan.py soft-H/14-256e --dry-run --workers 256 --ep 32 --set data.batch_size=4096
  python jobs/plan.py --cost                                        # every row of the papers
  python jobs/plan.py --cost S/16 vmoe-B/32 --json > costs.json     # these models
  python jobs/plan.py --check                                       # a laptop, or a head node
  python jobs/plan.py --check --workers 8 --set scale.use_gpu=true  # the cluster for that sweep

A plan has memory and traffic of a rank on every layout, and the best layout. Costs stand beside what the
papers print. Both are computed from the config: nothing is trained and no weights are made. docs/planning.md
has the formulae, and how far they were from measured memory.

--dry-run takes a step of the first worker with the code that trains, on tensors without memory and without
its peers: what does not divide fails here, and memory and traffic are those of the step. --dry-run --help
lists its flags. Exit code 1 if the memory does not suffice.

--check takes the flags of jobs/pareto_sweep.py, and --json; --check --help lists them. Every sweep runs the
same checks before it starts. Exit code 1 if a check fails. docs/planning.md lists the checks.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from jobs._cli import command, connect
from jobs._flags import FIELDS, PLUGIN, flag, parse
from jobs.pareto_sweep import SweepFlags
from jobs.train import preset
from moe.guests import offered
from orchestrator.errors import UsageError

if TYPE_CHECKING:
    from orchestrator.config import RunConfig
    from orchestrator.estimate import Layout

LAYOUTS = """\
GiB: 2^30 bytes of tensors at the peak of a step, by part; add a tenth for the allocator.
GB: 1e9 bytes that a rank sends per step, inside its node | to other nodes.
link s: at the links' nominal rates, without overlap of collectives with each other or with computation."""
COSTS = """\
ok: parameters and GFLOP within 1 % of the paper, exaFLOP within 2.5 %; parameters also within
half of the printed figure's last digit. Exit code 1 if a row is out. Models without a row
have ImageNet's 1000 classes. active: parameters that a token meets (Soft MoE: all)."""

MEMORY = flag(80.0, "memory of a device", metavar="GIB")


@dataclass(frozen=True, kw_only=True)
class PlanFlags:
    model: tuple[str, ...] = flag(
        (),
        "by name, e.g. soft-S/16-128e; an unknown name lists all; default: debug, or the papers' with --cost",
        positional=True,
        nargs="*",
    )
    devices: int = flag(8, "GPUs, with a worker each")
    devices_per_node: int = flag(8, "devices of a node")
    memory: float = MEMORY
    intra: float = flag(450.0, "rate from a device to its node", metavar="GB_PER_S")
    inter: float = flag(50.0, "rate from a device to other nodes", metavar="GB_PER_S")
    set: tuple[tuple[str, Any], ...] = FIELDS
    plugin: tuple[str, ...] = PLUGIN
    cost: bool = flag(False, "print parameters and FLOPs of models instead")
    json: bool = flag(False, "print the costs as a list of rows, figures in full")

    def __post_init__(self) -> None:
        if self.json and not self.cost:
            raise UsageError("--json does nothing without --cost or --check")
        if self.cost and self.set:
            raise UsageError("--set does nothing with --cost, which takes models by name")
        if len(self.model) > 1 and not self.cost:
            raise UsageError(
                f"{len(self.model)} models: layouts are planned for one, --cost compares several"
            )


@dataclass(frozen=True, kw_only=True)
class DryRunFlags:
    model: str = flag("debug", "by name, e.g. soft-H/14-256e", positional=True, nargs="?")
    dry_run: bool = flag(False, "take a step without memory and without peers")
    workers: int = flag(8, "GPUs, with a worker each (scale.workers)")
    ep: str = flag("auto", "number of workers that share one set of experts, or auto (scale.ep)")
    memory: float = MEMORY
    set: tuple[tuple[str, Any], ...] = FIELDS
    plugin: tuple[str, ...] = PLUGIN


@dataclass(frozen=True, kw_only=True)
class CheckFlags(SweepFlags):
    check: bool = flag(False, "check what the sweep needs")
    json: bool = flag(False, "print the findings as one document on stdout")


def main() -> None:
    if "--check" in sys.argv:
        return check(parse(CheckFlags, __doc__))
    if "--dry-run" in sys.argv:
        return try_layout(parse(DryRunFlags, __doc__))
    exits = "Exit code 1 if no layout fits."
    flags = parse(PlanFlags, __doc__, epilog=f"{LAYOUTS}\n{exits}\n\nWith --cost:\n{COSTS}")
    if flags.cost:
        with command("computing costs", plugins=flags.plugin, to=sys.stderr):
            return print_costs(flags)
    (model,) = flags.model or ("debug",)
    with command(f"planning {model} on {flags.devices} devices", plugins=flags.plugin):
        plan(model, flags)


def plan(model: str, flags: PlanFlags) -> None:
    """Prints the plan.

    Raises:
        UsageError: after the tables, if no layout fits the memory.
    """
    from orchestrator.estimate import Links, choose, layouts, resolve_auto

    run = planned_run(model, flags)
    found = layouts(run, Links(intra_gb_per_s=flags.intra, inter_gb_per_s=flags.inter))
    print(f"{summary(run)}\n\n{memory_table(found, flags.memory)}\n\n{traffic_table(found)}\n\n{LAYOUTS}\n")
    chosen, auto = choose(found, memory_gib=flags.memory), resolve_auto(run).ep()
    print(f"chosen: dp={chosen.dp}, ep={chosen.ep}, least time on links among the layouts that fit")
    if auto != chosen.ep:
        print(f"scale.ep=auto ignores memory and --intra, --inter: it takes {auto}; set scale.ep={chosen.ep}")


def planned_run(model: str, flags: PlanFlags) -> RunConfig:
    """The run of `train.py` with as many workers as devices."""
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
    return on_gpus(model, assigned | mesh)


def on_gpus(model: str, changes: dict[str, Any]) -> RunConfig:
    from moe.codec import to_dict
    from orchestrator.codec import override
    from orchestrator.config import RunConfig

    return override(RunConfig(), {"model": to_dict(preset(model)), "scale.use_gpu": True} | changes)


def summary(run: RunConfig) -> str:
    from moe.cost import num_expert_params, num_params
    from orchestrator.estimate import FP32, checkpoint_bytes

    params, experts, images = num_params(run.model), num_expert_params(run.model), run.images_per_pass()
    return (
        f"{params / 1e6:.1f}M parameters, {experts / 1e6:.1f}M of them in experts; a checkpoint is"
        f" {checkpoint_bytes(run) / 1e9:.2f} GB, its weights alone {FP32 * params / 1e9:.2f} GB\n"
        f"a step of a rank: {run.data.batch_size // run.scale.workers // images} x {images} images,"
        f" {run.compute_dtype()}, {run.train.optimizer.kind}, {run.scale.workers} devices,"
        f" {run.scale.workers_per_node} to a node"
    )


def try_layout(flags: DryRunFlags) -> None:
    """Prints what a step of the first worker holds and sends; exits with 1 if its device cannot hold it."""
    with command(f"dry run of {flags.model} on {flags.workers} workers", plugins=flags.plugin):
        from orchestrator.estimate import GIB, memory_problem, resolve_auto
        from orchestrator.training.dry_run import dry_run

        mesh = {"scale.workers": flags.workers, "scale.ep": flags.ep}
        run = resolve_auto(on_gpus(flags.model, dict(flags.set) | mesh))
        print(f"{summary(run)}\ndp={flags.workers // run.ep()}, ep={run.ep()}", flush=True)
        found = dry_run(run)
        print(f"\n{'':18}{'GiB':>9}")
        peaks = {f"peak, {phase}": size for phase, size in found.peaks.items()}
        for part, size in {"parameters": found.parameters, "optimizer": found.optimizer, **peaks}.items():
            print(f"{part:18}{size / GIB:9.2f}")
        print(f"\n{'collective':18}{'ranks':>9}{'stride':>9}{'count':>9}{'GB sent':>11}")
        for (kind, ranks, stride), (count, sent) in found.collectives.items():
            print(f"{kind:18}{ranks:9}{stride:9}{count:9}{sent / 1e9:11.3f}")
        print(f"\nthe dry run took {found.seconds:.0f} s")
        if problem := memory_problem(max(found.peaks.values()) / GIB, flags.memory):
            raise UsageError(f"{flags.model} {problem}")


def memory_table(found: Sequence[Layout], memory_gib: float) -> str:
    from orchestrator.estimate import GIB

    lines = [f"{'GiB':<5}{'dp':>5}{'ep':>5}{''.join(f'{part:>12}' for part in found[0].memory)}{'peak':>9}"]
    for layout in found:
        parts = "".join(f"{size / GIB:12.2f}" for size in layout.memory.values())
        fits = "fits" if layout.peak() <= memory_gib * GIB else "does not fit"
        lines.append(f"{layout.dp:10}{layout.ep:5}{parts}{layout.peak() / GIB:9.2f}  {fits}")
    return "\n".join(lines)


def traffic_table(found: Sequence[Layout]) -> str:
    from orchestrator.estimate import Sent

    names = "".join(f"{name:>17}" for name in (*found[0].traffic, "sum"))
    lines = [f"{'GB':<5}{'dp':>5}{'ep':>5}{names}{'link s':>9}"]
    for layout in found:
        sent = (*layout.traffic.values(), sum(layout.traffic.values(), Sent(0, 0)))
        cells = "".join(f"{f'{one.intra / 1e9:.2f} | {one.inter / 1e9:.2f}':>17}" for one in sent)
        lines.append(f"{layout.dp:10}{layout.ep:5}{cells}{layout.seconds:9.4f}")
    return "\n".join(lines)


def print_costs(flags: PlanFlags) -> None:
    """Prints what the models cost; exits with 1 if a figure differs from the paper's."""
    modules = [import_module(name) for name in offered("COSTS").values()]
    if not modules:
        raise UsageError("--cost compares models with those of the papers, and the folder papers is missing")
    found = [module.costs(row) for module in modules for row in module.rows(flags.model)]
    print(json.dumps(found, indent=1) if flags.json else cost_table(found))
    if any(row["within"] is False for row in found):
        raise SystemExit(1)


def cost_table(found: Sequence[dict[str, Any]]) -> str:
    width = max(16, *(len(one["model"]) for one in found))
    lines = [
        f"{'':{width}} {'parameters':^29} {'GFLOP/img, forward':^21} {'exaFLOP, training':^27}",
        f"{'model':{width}} {'active':>7} {'all':>7} {'paper':>6} {'%':>5}"
        f" {'2/MAC':>7} {'paper':>7} {'%':>5} {'/MAC':>4} {'ours':>7} {'paper':>7} {'%':>5}  ok  notes",
    ]
    for one in found:
        paper, percent = one["paper"], one["difference_percent"]
        ok = {True: "yes", False: "NO", None: ""}[one["within"]]
        cells = (
            f"{_short(one['active_params']):>7} {_short(one['params']):>7} {_short(paper['params']):>6}",
            f"{_number(percent['params'], '+.1f'):>5} {_number(one['forward_gflops_2mac']):>7}",
            f"{_number(paper['gflop']):>7} {_number(percent['gflop'], '+.1f'):>5}",
            f"{one['train_flops_per_mac'] or '':>4} {_number(one['train_exaflops']):>7}",
            f"{_number(paper['exaflop']):>7} {_number(percent['exaflop'], '+.1f'):>5}  {ok:3} {one['note']}",
        )
        lines.append(f"{one['model']:{width}} {' '.join(cells)}")
    return "\n".join(line.rstrip() for line in lines)


def _short(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value / 1e9:.4g}B" if value >= 1e9 else f"{value / 1e6:.4g}M"


def _number(value: float | None, form: str = ".1f") -> str:
    return "" if value is None else f"{value:{form}}"


def check(flags: CheckFlags) -> None:
    """Prints what the checks found; exits with 1 if one of them failed."""
    to, places = sys.stderr if flags.json else sys.stdout, flags.run.places
    with command("checking what the sweep needs", plugins=places.plugin, to=to):
        from orchestrator.planning.preflight import preflight

        with redirect_stdout(to):
            sweep = flags.make()
            flags.priced(sweep)
            findings = preflight(
                sweep,
                connect=connect,
                open_store=places.open_store,
                retrain=bool(flags.retrain()),
                verify=flags.run.verify,
                machines=True,
            )
        failed = sum(not finding.ok for finding in findings)
        if flags.json:
            print(json.dumps({"findings": [asdict(one) for one in findings], "failed": failed}, indent=1))
        else:
            for finding in findings:
                print(f"{'ok' if finding.ok else 'FAIL':5} {finding.check:13} {finding.message}")
            print(f"{failed} of {len(findings)} checks failed")
        if failed:
            sys.exit(1)


if __name__ == "__main__":
    main()

"""Compute what models cost from their configs alone, beside what their papers print.

python jobs/cost.py                      every row of the papers
python jobs/cost.py S/16 vmoe-B/32       these models, with the papers' rows where there are any
python jobs/cost.py --json > costs.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from jobs._cli import command
from jobs._flags import flag, parse
from orchestrator.errors import UsageError

JFT_4B, JFT_300M, JFT_3B = 29_593, 18_291, 30_000  # classes; the last as V-MoE section 3.6 rounds it
STEP = 4096  # images per step, Soft MoE section 3.3
EPOCHS_14 = 14 * 305_000_000  # V-MoE: JFT-300M's 305M images; fits all rows of table 2 that print no epochs
TOLERANCE = {"params": 0.01, "gflop": 0.01, "exaflop": 0.025}  # softmax, LayerNorm and GELU are not counted


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of a paper's table.

    Attributes:
        classes: outputs of the head; None keeps the preset's.
        images: seen in training.
        flops_per_mac: convention of the exaFLOP, forward and backward together.
        params: as printed, because the last digit says how precise the figure is.
        gflop: forward, per image, two FLOPs per MAC.
    """

    model: str
    source: str = ""
    classes: int | None = None
    images: int | None = None
    flops_per_mac: int = 6
    params: str | None = None
    gflop: float | None = None
    exaflop: float | None = None
    note: str = ""


SOFT_MOE = Row(model="", source="Soft MoE, table 1", classes=JFT_4B, flops_per_mac=3)
VMOE = Row(model="", source="V-MoE, table 2", classes=JFT_300M, images=EPOCHS_14)
PRINTED = [
    *(
        replace(SOFT_MOE, model=m, params=p, gflop=g, images=n * 10**6 * STEP, exaflop=e, note=f"{n}M steps")
        for m, p, g, n, e in (
            ("S/16", "33e6", 9.2, 4, 227.1),
            ("B/16", "108e6", 35.1, 4, 864.1),
            ("L/16", "333e6", 122.9, 4, 3025.4),
            ("H/14", "669e6", 334.2, 1, 2060.2),
            ("H/14", "669e6", 334.2, 2, 4120.3),
            ("soft-S/14-256e", "1.8e9", 13.2, 10, 814.2),
            ("soft-B/16-128e", "3.7e9", 32.0, 9, 1769.5),
            ("soft-L/16-128e", "13.1e9", 111.1, 4, 2734.1),
        )
    ),
    Row(model="soft-H/14-128e", source="Soft MoE, abstract", classes=JFT_4B, note=">40x H/14"),
    Row(model="soft-H/14-256e", source="Soft MoE, section 3.4", classes=JFT_4B, params="54e9"),
    replace(VMOE, model="vmoe-H/14-dense", params="656e6", exaflop=4270),
    replace(VMOE, model="vmoe-L/16", params="3.4e9", exaflop=2170),
    replace(VMOE, model="vmoe-H/14-last-5", params="2.7e9", exaflop=4750),
    replace(VMOE, model="vmoe-H/14", params="7.2e9", exaflop=5790),
    replace(
        VMOE,
        model="vmoe-15B",
        classes=JFT_3B,
        images=None,
        params="14.7e9",
        exaflop=33_900,
        note="images n/a",
    ),
]


def costs(row: Row) -> dict[str, Any]:
    """Our figures, the paper's, the difference in percent; `within` is None where the paper prints none."""
    from moe import cost
    from moe.presets import PRESETS

    config = PRESETS[row.model]
    if row.classes:
        config = replace(config, num_classes=row.classes)
    train_flops = {3: cost.train_flops_3mac, 6: cost.train_flops_6mac}[row.flops_per_mac]
    ours = {
        "params": cost.num_params(config),
        "gflop": cost.forward_gflops_2mac(config),
        "exaflop": train_flops(config, row.images) / 1e18 if row.images else None,
    }
    paper = {"params": row.params and float(row.params), "gflop": row.gflop, "exaflop": row.exaflop}
    both = {name: (ours[name], printed) for name, printed in paper.items() if printed and ours[name]}
    allowed = {name: TOLERANCE[name] * printed for name, (_, printed) in both.items()}
    if row.params:
        allowed["params"] = max(allowed["params"], _half_of_last_digit(row.params))
    return {
        "model": row.model,
        "source": row.source,
        "note": row.note,
        "num_classes": config.num_classes,
        "params": ours["params"],
        "active_params": cost.num_active_params(config),
        "forward_gflops_2mac": ours["gflop"],
        "train_images": row.images,
        "train_flops_per_mac": row.flops_per_mac if row.images else None,
        "train_exaflops": ours["exaflop"],
        "paper": paper,
        "difference_percent": {
            name: 100 * (both[name][0] / both[name][1] - 1) if name in both else None for name in paper
        },
        "within": all(abs(a - b) <= allowed[name] for name, (a, b) in both.items()) if both else None,
    }


def _half_of_last_digit(printed: str) -> float:
    """Half a unit of the last digit: 0.05e9 for ``1.8e9``."""
    exponent = Decimal(printed).as_tuple().exponent
    assert isinstance(exponent, int)
    return float(Decimal(5).scaleb(exponent - 1))


def table(found: Sequence[dict[str, Any]]) -> str:
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


def rows(models: Sequence[str]) -> list[Row]:
    """The papers' rows of these models, or a row without printed figures; without models all rows.

    Raises:
        UsageError: if there is no such model.
    """
    from moe.presets import PRESETS

    if unknown := [name for name in models if name not in PRESETS]:
        raise UsageError(f"unknown model {unknown[0]!r}; known: {', '.join(PRESETS)}")
    printed = {name: [row for row in PRINTED if row.model == name] for name in models}
    return [row for name in models for row in printed[name] or [Row(model=name)]] or PRINTED


@dataclass(frozen=True, kw_only=True)
class CostFlags:
    models: tuple[str, ...] = flag(
        (),
        "by name, e.g. soft-S/16-128e; an unknown name lists all; default: every row of the papers",
        positional=True,
        nargs="*",
        metavar="MODEL",
    )
    json: bool = flag(False, "print a list of rows, figures in full")


CONVENTIONS = """\
ok: parameters and GFLOP within 1 % of the paper, exaFLOP within 2.5 %; parameters also within
half of the printed figure's last digit. Exit code 1 if a row is out. Models without a row
have ImageNet's 1000 classes. active: parameters that a token meets (Soft MoE: all)."""


def main() -> None:
    flags = parse(CostFlags, __doc__, epilog=CONVENTIONS)
    with command("computing costs", to=sys.stderr):
        found = [costs(row) for row in rows(flags.models)]
        print(json.dumps(found, indent=1) if flags.json else table(found))
        if any(row["within"] is False for row in found):
            raise SystemExit(1)


if __name__ == "__main__":
    main()

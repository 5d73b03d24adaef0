"""Compute what models cost from their configs alone, beside what their papers print.

python jobs/cost.py                      every row of the papers
python jobs/cost.py S/16 vmoe-B/32       these models, with the papers' rows where there are any
python jobs/cost.py --json > costs.json
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jobs._cli import command
from jobs._flags import flag, parse

CONVENTIONS = """\
ok: parameters and GFLOP within 1 % of the paper, exaFLOP within 2.5 %; parameters also within
half of the printed figure's last digit. Exit code 1 if a row is out. Models without a row
have ImageNet's 1000 classes. active: parameters that a token meets (Soft MoE: all)."""


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


def main() -> None:
    flags = parse(CostFlags, __doc__, epilog=CONVENTIONS)
    with command("computing costs", to=sys.stderr):
        from papers.costs import costs, rows

        found = [costs(row) for row in rows(flags.models)]
        print(json.dumps(found, indent=1) if flags.json else table(found))
        if any(row["within"] is False for row in found):
            raise SystemExit(1)


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


if __name__ == "__main__":
    main()

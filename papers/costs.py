"""Parameters and FLOPs of the papers' models, computed from configs, beside the papers' own figures."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from moe import cost
from moe.presets import PRESETS
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
    config = PRESETS[row.model]
    if row.classes:
        config = replace(config, **config.for_classes(row.classes))
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
        "num_classes": config.num_outputs(),
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


def rows(models: Sequence[str]) -> list[Row]:
    """The papers' rows of these models, or a row without printed figures; without models all rows.

    Raises:
        UsageError: if there is no such model.
    """
    if unknown := [name for name in models if name not in PRESETS]:
        raise UsageError(f"unknown model {unknown[0]!r}; known: {', '.join(PRESETS)}")
    printed = {name: [row for row in PRINTED if row.model == name] for name in models}
    return [row for name in models for row in printed[name] or [Row(model=name)]] or PRINTED

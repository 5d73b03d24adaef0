"""Our routers, layers, models and optimisers against arrays of independent reference implementations.

  python -m tests.golden DIR [DIR ...]

Runs every ``<family>__<case>.npz`` of the folders and prints a line per case: each array's largest error over
its largest entry, or ``none`` for what has no counterpart here. Families that are not known here are named at
the end, and their files are not checked.
Exit code 1 if a forward array is off by more than 3e-5, a gradient by more than 1e-4, a dispatch differs, or
nothing was checked.

The files come from google-research/vmoe run in JAX, POT, and plain-Python algorithms; they hold their own
description in `meta`. Transport plans are solved here in float64 until they converge. Not compared: the bf16
dispatcher's `y_bf16`, which has no counterpart here.
"""

import sys
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from moe.guests import guests
from tests.golden_causal import causal
from tests.golden_gates import (
    balanced,
    capacities,
    cosine,
    dropless,
    gate,
    log_sum_exp,
    loss_free,
    quantile,
    relu,
    seats,
    shared,
)
from tests.golden_models import few_shot, lamb, model, optimizer, posemb, schedule, targets
from tests.golden_recipes import block, drop_rates, repeated
from tests.golden_report import Arrays, Meta, Report
from tests.golden_routers import (
    capacity,
    hashed,
    one_expert,
    sinkhorn_choice,
    soft,
    softmax_choice,
    sparse_choice,
)
from tests.golden_text import canonicalize, padding
from tests.golden_training import deit3_schedule, ema, layer_rates, soup, upcycle
from tests.moe.parts import read_golden


def family_of(path: Path) -> str:
    return path.stem.partition("__")[0]


class NotBuiltError(Exception):
    """Why no model here computes a case."""


def check(path: Path) -> Report:
    """Compares a case of a known family. Raises NotBuiltError for what it holds and no model here has."""
    arrays, meta = read_golden(path)
    for has, why in WITHOUT.items():
        if has(family_of(path), arrays, meta.get("config") or {}):
            raise NotBuiltError(why)
    report = Report(nan_fields=tuple(meta.get("nan_fields") or ()))
    FAMILIES[family_of(path)](arrays, meta, report)
    return report


FAMILIES: dict[str, Callable[[Arrays, Meta, Report], None]] = {
    "softmax_token_choice": softmax_choice,
    "softmax_expert_choice": softmax_choice,
    "sinkhorn_token_choice": sinkhorn_choice,
    "sinkhorn_expert_choice": sinkhorn_choice,
    "sparsity_constrained_expert_choice": sparse_choice,
    "soft_moe": soft,
    "soft_moe_ablation": soft,
    "capacity": capacity,
    "hash": hashed,
    "theorem1": one_expert,
    "model": model,
    "schedule": schedule,
    "optimizer": optimizer,
    "lamb": lamb,
    "posemb": posemb,
    "fewshot": few_shot,
    "targets": targets,
    "block": block,
    "drop_rates": drop_rates,
    "repeated": repeated,
    "canonicalize": canonicalize,
    "padding": padding,
    "ema": ema,
    "layer_rates": layer_rates,
    "deit3_schedule": deit3_schedule,
    "soup": soup,
    "upcycle": upcycle,
    "causal": causal,
    "gate": gate,
    "loss_free": loss_free,
    "quantile": quantile,
    "z_loss": log_sum_exp,
    "balance_loss": balanced,
    "cosine": cosine,
    "relu": relu,
    "seats": seats,
    "dropless": dropless,
    "shared": shared,
    "capacity_rules": capacities,
}
OF_GUESTS = {"wings": "tests.wings.image_text.goldens", "papers": "tests.papers.goldens"}
for guest in guests():
    FAMILIES |= import_module(OF_GUESTS[guest.__name__]).FAMILIES

NOT_BUILT = {  # family -> why
    "base": "balanced assignment: a Sinkhorn plan is its smooth form, and runs on the device",
    "calmops": "a post-norm layer with a query projection, which no other model here has",
    "hash": "balanced tables of word counts: patches have no ids",
    "group_limited": "experts in groups, which only expert parallelism over nodes gains from",
}


def _constant_weights(family: str, arrays: Arrays, config: Any) -> bool:
    """Whether the only weight of a token is divided by itself. Cases of `loss_free` compare biases,
    which do not depend on weights.
    """
    alone = config.get("k") == 1 and config.get("normalise") and config.get("normalise_k1")
    return bool(alone) and family != "loss_free"


WITHOUT: dict[Callable[[str, Arrays, Any], bool], str] = {  # what a case holds -> why it is not built
    _constant_weights: "weights that are constant at k = 1, by which a router learns nothing",
    lambda _, arrays, config: "shared_gate" in arrays: "a gate of the shared expert",
    lambda family, arrays, config: family == "hash" and "table" in arrays: NOT_BUILT["hash"],
    lambda _, arrays, config: (config.get("groups") or 1) > 1: NOT_BUILT["group_limited"],
}


def main(folders: list[str]) -> int:
    paths = sorted(path for folder in folders for path in Path(folder).glob("*.npz"))
    if not paths:
        print(__doc__, f"\nno .npz in {folders}" if folders else "", file=sys.stderr)
        return 1
    torch.set_num_threads(1)
    counts, unknown = {"ok": 0, "FAIL": 0, "none": 0}, Counter[str]()
    for path in paths:
        family = family_of(path)
        if family not in FAMILIES.keys() | NOT_BUILT.keys():
            unknown[family] += 1
            continue
        try:
            if family not in FAMILIES:
                raise NotBuiltError(NOT_BUILT[family])
            report = check(path)
            verdict, text = "FAIL" if report.failed() else "ok", str(report)
        except NotBuiltError as error:
            verdict, text = "none", str(error)
        except Exception as error:  # the cases after it still count
            verdict, text = "FAIL", f"{type(error).__name__}: {error}"
        counts[verdict] += 1
        print(f"{verdict:5}{path.stem}  {text}".rstrip(), flush=True)
    for family, files in unknown.items():
        print(f"unknown family {family}: {files} not checked")
    if unknown:
        print(f"known families: {', '.join(FAMILIES)}")
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    return int(counts["FAIL"] > 0 or not counts["ok"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

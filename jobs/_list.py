"""Prints what can be trained by name: sweeps and their sources, scales, and models with their cost.

They are read from ``listing.json``, because computing them takes half a minute; ``write`` makes that file.
"""

from __future__ import annotations

import inspect
import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

from jobs._cli import print_table
from moe.guests import PACKAGES, guests, offered

FILE = Path(__file__).with_name("listing.json")
Listed = tuple[list[str], list[list[Any]]]  # columns and rows


def print_models() -> None:
    print_table(*_read()["models"], title="models by name", left=3)


def print_sweeps(scale: str) -> None:
    """Prints the sweeps with their arms at a scale, the scales, the models, and what the papers have."""
    listed = _read()
    print_table(*listed["sweeps"][scale], title="sweeps", left=3)
    print_table(*listed["scales"], title="scales, before a sweep's own recipe", left=2)
    print_models()
    for name, module in offered("ROWS").items():
        rows = [row[:4] for row in import_module(module).rows()]
        print_table(("row", f"of the {name}", "state", "how"), rows, left=4)


def _read() -> dict[str, Any]:
    """Reads the file, which lists what the guests have; where a guest is missing, the lists are computed."""
    return json.loads(FILE.read_text()) if len(guests()) == len(PACKAGES) else listing()


def listing() -> dict[str, Any]:
    """Computes what the file holds."""
    from orchestrator.sweeps.catalog import SCALES

    by_scale = {scale: sweeps(scale) for scale in SCALES}
    return {"models": models(), "scales": scales(), "sweeps": by_scale}


def models() -> Listed:
    """The models of the papers, with ImageNet's classes."""
    from moe.cost import forward_gflops_2mac, num_params
    from moe.guests import join_families
    from moe.presets import PRESETS

    join_families()

    rows = [
        [
            name,
            model.family(),
            f"{model.image_side()} x {model.image_side()}",
            f"{num_params(model) / 1e6:,.1f}M",
            f"{forward_gflops_2mac(model):.3g}",
        ]
        for name, model in PRESETS.items()
    ]
    return ["--model", "family", "image", "parameters", "forward GFLOPs (2 per MAC)"], rows


def sweeps(scale: str) -> Listed:
    from orchestrator.sweeps.catalog import SCALES, SWEEPS, make_sweep

    rows = []
    for name in SWEEPS:
        arms = len(make_sweep(name, scale).arms) or "drawn" if SWEEPS[name].runs_at(SCALES[scale]) else "-"
        rows.append([name, what(name), source(name), arms])
    return ["--sweep", "question", "source", f"arms at {scale}"], rows


def scales() -> Listed:
    from orchestrator.sweeps.catalog import SCALES

    rows = []
    for name, found in SCALES.items():
        run = found.base
        training = f"{run.train.steps:,} x {run.data.batch_size}"
        loss = getattr(run.task, "loss", run.task.kind)
        model = (run.model.image_side(), run.model.num_outputs())
        rows.append([name, " ".join(found.sizes), *model, found.experts, training, loss])
    return ["--scale", "sizes", "image", "classes", "experts", "steps x batch", "loss"], rows


def what(sweep: str) -> str:
    """The first sentence of a sweep's description."""
    return description(sweep).splitlines()[0]


def source(sweep: str) -> str:
    """Paper, sections, figures and tables of a sweep."""
    text = " ".join(description(sweep).split())
    found = re.search(r"Source: (.+?)(?::|\.( |$))", text)
    assert found, sweep
    return found[1]


def description(sweep: str) -> str:
    from orchestrator.sweeps.catalog import SWEEPS

    return inspect.cleandoc(SWEEPS[sweep].make.__doc__ or "")


def written() -> str:
    """The text of the file, with a row to a line."""
    text = json.dumps(listing(), indent=1, ensure_ascii=False)
    return re.sub(r"\[\s+[^][{}]*?\s+\]", lambda row: re.sub(r"\s*\n\s*", " ", row[0]), text) + "\n"


def write() -> None:
    FILE.write_text(written())

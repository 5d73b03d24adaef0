"""Weights that other libraries wrote, and changed copies of them."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file, save_file
from torch import Tensor

from wings.weights import plan_import, write_import

GOLDENS = Path(__file__).parents[2] / "goldens" / "weights"


def expected_of(case: str) -> Any:
    beside = GOLDENS / f"{case.partition('.')[0]}.expected.npz"
    return np.load(beside if beside.is_file() else (GOLDENS / case.partition("/")[0] / "expected.npz"))


def imported(source: Path | str, out: Path, **changes: Any) -> dict[str, Tensor]:
    write_import(plan_import(str(source), name="x", changes=changes), str(out))
    return load_file(out / "model.safetensors")


def rewritten(case: str, folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> Path:
    """A copy of a golden folder with changed tensors."""
    copy = Path(shutil.copytree(GOLDENS / case, folder / case))
    tensors = load_file(copy / "model.safetensors")
    change(tensors)
    save_file(tensors, copy / "model.safetensors")
    return copy


def configured(case: str, folder: Path, changes: dict[str, Any], *, without: Sequence[str] = ()) -> Path:
    """A copy of a golden folder with another config.json."""
    copy = Path(shutil.copytree(GOLDENS / case, folder / case, dirs_exist_ok=True))
    config = json.loads((copy / "config.json").read_text()) | changes
    (copy / "config.json").write_text(json.dumps({n: v for n, v in config.items() if n not in without}))
    return copy

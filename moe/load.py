"""An exported model, loaded with torch and the standard library alone.

Copy the folder `moe` and what `jobs/export.py --out DIR/` wrote; then ``load("DIR")`` gives the model. The
format is https://github.com/huggingface/safetensors#format; nothing is pickled.
"""

import json
from dataclasses import is_dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, get_args, get_type_hints

import torch
from torch import Tensor

from moe.vit import ViT, ViTConfig

CONFIG, WEIGHTS = "config.json", "model.safetensors"  # of an exported folder
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def load(path: str | Path, device: torch.device | str = "cpu") -> ViT:
    """The model of an exported folder or of an exported file, in evaluation mode: ``model(images).logits``
    for images (B, 3, H, W) in -1..1 (``pixels / 127.5 - 1``).

    Raises:
        ValueError: if a file is not whole, the tensors are not those of the model that the config describes,
            or they have another dtype.
        FileNotFoundError: if there is no such folder or file.
    """
    path = Path(path)
    metadata, tensors = read_tensors(path / WEIGHTS if path.is_dir() else path, device)
    content = (path / CONFIG).read_text() if path.is_dir() else metadata.get("config", "{}")
    config = json.loads(content)
    if "model" not in config:
        raise ValueError(f"{path} is no export: its config has no model")
    with torch.device("meta"):
        model = ViT(read_config(ViTConfig, config["model"]))
    expected = model.state_dict()
    for name, tensor in tensors.items():
        if name in expected and tensor.dtype != expected[name].dtype:
            raise ValueError(f"{path}: {name} is {tensor.dtype}, the model's is {expected[name].dtype}")
    try:
        model.load_state_dict(tensors, assign=True)
    except RuntimeError as error:
        raise ValueError(f"{path} does not hold the model that its config describes: {error}") from None
    return model.eval()


def read_config(hint: Any, value: Any) -> Any:
    """A config from JSON: of several dataclasses the one of the same `kind`. Each checks itself.

    Raises:
        ValueError: for a kind or a field that these sources do not know: those of the export are newer.
    """
    if not isinstance(value, dict):
        return tuple(value) if isinstance(value, list) else value
    members: list[Any] = [member for member in get_args(hint) or [hint] if is_dataclass(member)]
    chosen = [member for member in members if getattr(member, "kind", None) == value.get("kind")]
    if not chosen:
        raise ValueError(f"unknown kind {value.get('kind')!r} of {' or '.join(m.__name__ for m in members)}")
    hints = get_type_hints(chosen[0])
    if unknown := sorted(value.keys() - hints.keys()):
        raise ValueError(f"{chosen[0].__name__} has no {unknown[0]}; it has {', '.join(hints)}")
    return chosen[0](**{name: read_config(hints[name], field) for name, field in value.items()})


def read_tensors(path: Path, device: torch.device | str = "cpu") -> tuple[dict[str, str], dict[str, Tensor]]:
    """Metadata and tensors of a safetensors file. Raises as `load`."""
    with path.open("rb") as file:
        size, length = path.stat().st_size, int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(length) if 8 + length <= size else b"")
            metadata = header.pop("__metadata__", {})
            end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        except (ValueError, TypeError, KeyError, AttributeError):
            raise ValueError(f"{path} is no safetensors file") from None
        if end != size:
            raise ValueError(f"{path} has {size} bytes, its header says {end}: it is not whole")
        return metadata, {n: _tensor(file, 8 + length, n, e).to(device) for n, e in header.items()}


def _tensor(file: BufferedReader, begin: int, name: str, entry: dict[str, Any]) -> Tensor:
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"{name} is {entry['dtype']}; known: {', '.join(DTYPES)}")
    dtype, (first, end) = DTYPES[entry["dtype"]], entry["data_offsets"]
    empty = torch.empty(entry["shape"], dtype=dtype, device="meta")
    if empty.numel() * dtype.itemsize != end - first:
        raise ValueError(f"{name} has {end - first} bytes, its shape {entry['shape']} says otherwise")
    if not empty.numel():
        return torch.empty(entry["shape"], dtype=dtype)
    content = bytearray(end - first)  # the tensor keeps it
    file.seek(begin + first)
    file.readinto(content)
    return torch.frombuffer(content, dtype=dtype).view(entry["shape"])

"""An exported model, loaded with torch and safetensors, without the rest of this project.

Copy the folder `moe` and what `jobs/export.py --out DIR/` wrote; then ``load("DIR")`` returns the model.
Import the user's own files that it was made with first: they are in ``DIR/plugins``.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

import moe.models  # noqa: F401, because its classes are the kinds of models
from moe.codec import from_dict
from moe.init import set_unsaved
from moe.model import Model, ModelConfig
from moe.signature import SIGNATURE, Signature, read_signature
from moe.upgrade import upgraded_model

# The files of an exported folder.
CONFIG, WEIGHTS = "config.json", "model.safetensors"


def load(path: str | Path, device: torch.device | str = "cpu") -> Model:
    """Returns the model of an exported folder or file, in evaluation mode.

    ``model(images).logits`` takes images (B, 3, H, W) in -1..1 (``pixels / 127.5 - 1``).

    Raises ValueError if a file is damaged or its tensors are not those of the model that its config
    describes, and FileNotFoundError if there is no such folder or file.
    """
    path = Path(path)
    try:
        with safe_open(path / WEIGHTS if path.is_dir() else path, "pt", str(device)) as file:
            metadata, tensors = file.metadata() or {}, file.get_tensors()
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from None
    try:
        config = json.loads((path / CONFIG).read_text() if path.is_dir() else metadata.get("config", "{}"))
        if "model" not in config:
            raise ValueError("its config has no model")
        model_config = _model_config(config)
        with torch.device("meta"):
            model = model_config.build(seed=None)
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"{path} is not an export: {error}") from None
    expected = model.state_dict()
    for name, tensor in tensors.items():
        if name in expected and tensor.dtype != expected[name].dtype:
            raise ValueError(f"{path}: {name} is {tensor.dtype}, the model's is {expected[name].dtype}")
    try:
        model.load_state_dict(tensors, assign=True)
    except RuntimeError as error:
        raise ValueError(f"{path} does not hold the model that its config describes: {error}") from None
    set_unsaved(model, device)
    return model.eval()


def load_signature(path: str | Path) -> Signature:
    """Returns what the model of an exported folder or file takes and gives.

    Raises ValueError if the file does not say, and FileNotFoundError if there is no such folder or file.
    """
    path = Path(path)
    try:
        if path.is_dir():
            return read_signature(json.loads((path / CONFIG).read_text()).get(SIGNATURE))
        with safe_open(path, "pt") as file:
            return read_signature((file.metadata() or {}).get(SIGNATURE))
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None


def _model_config(config: dict[str, Any]) -> ModelConfig:
    try:
        return from_dict(ModelConfig, upgraded_model(config["model"]), "model.")
    except ValueError as error:
        made = (
            f"; import the files it was made with: {', '.join(plugins)}"
            if (plugins := config.get("plugins"))
            else ""
        )
        raise ValueError(f"{error}{made}") from None

"""Models of ours as folders of other libraries: the names of the way in, read backwards.

A library says in its own file what it calls the tensors, and what its config says. Weights go out bit for
bit, so that the library's output differs by nothing but its own arithmetic. LayerScale is multiplied into the
layer before it where a library has none.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from moe.dense import sincos2d
from moe.exported import CONFIG, WEIGHTS
from moe.models.vit import ViTConfig
from moe.signature import SIGNATURE
from orchestrator import storage
from orchestrator.checkpoint.card import PREPROCESSOR, preprocessor
from orchestrator.checkpoint.export import check_export
from orchestrator.checkpoint.models import ModelRef
from orchestrator.checkpoint.weights import write_file
from orchestrator.codec import to_dict
from orchestrator.errors import UsageError
from wings.weights.kind import TensorNames
from wings.weights.mapping import scaled_rows


@dataclass(frozen=True, kw_only=True)
class ForeignFolder:
    """The names of a model's tensors in another library, and its ``config.json``.

    Attributes:
        prefix: of all names but the head's.
        opens: the call that opens the folder {out}.
    """

    config: Mapping[str, Any]
    names: TensorNames
    prefix: str = ""
    opens: str


def check_expressible(library: str, lacking: Mapping[str, bool], *, instead: str) -> None:
    """Raises UsageError that names the options of a model which a library cannot express."""
    if standing := [option for option, holds in lacking.items() if holds]:
        raise UsageError(f"{library} cannot express {', '.join(standing)}: `format` {instead} can")


def write_foreign(out: str, folder: ForeignFolder, model: ModelRef, *, fresh: bool = False) -> None:
    """Writes a model of ours for another library.

    Raises:
        UsageError: if `out` is not local, or holds an export that is not to be replaced (`fresh`), or the
            model has a kind of positions that other libraries have not.
        OSError: if writing fails.
    """
    check_export(out, fresh=fresh)
    config = cast(ViTConfig, model.run.model)
    tensors = foreign_tensors(folder, model.load().state_dict(), config)
    Path(out, CONFIG).unlink(missing_ok=True)  # it must never describe other weights
    write_file(f"{out}/{WEIGHTS}", tensors, {"format": "pt"})
    content = {**folder.config, SIGNATURE: to_dict(model.signature)}
    about = {PREPROCESSOR: preprocessor(config.image_size, model.run.data), CONFIG: content}
    for name, content in about.items():
        storage.write_bytes(f"{out}/{name}", json.dumps(content, indent=2).encode())


def foreign_tensors(
    folder: ForeignFolder, ours: Mapping[str, Tensor], config: ViTConfig
) -> dict[str, Tensor]:
    """Returns the tensors of a dense ViT by the library's names.

    Raises:
        UsageError: for a kind of positions that is no table.
    """
    names, theirs = folder.names, {}

    def take(layer: str, *bases: str) -> None:
        """Cuts a layer of ours into its layers there, one below the other. A norm of queries has no bias."""
        weight = ours.get(f"{layer}.weight")
        if weight is None:
            return
        bias = ours.get(f"{layer}.bias", torch.zeros(weight.shape[0]))
        for part, whole in (("weight", weight), ("bias", bias)):
            theirs.update(
                {f"{base}{part}": cut for base, cut in zip(bases, whole.chunk(len(bases)), strict=True)}
            )

    take("embed", names.embed)
    for i in range(config.depth):
        block = names.block.format(i=i)
        for layer, bases in {
            "norm1": (names.norm1,),
            "attention.qkv": names.qkv,
            "attention.norm_q": (names.norm_q,),
            "attention.norm_k": (names.norm_k,),
            "attention.out": (names.out,),
            "norm2": (names.norm2,),
            "mlp.up": (names.up,),
            "mlp.down": (names.down,),
        }.items():
            take(f"blocks.{i}.{layer}", *(f"{block}{base}" for base in bases))
        scales = (names.scale1, names.out), (names.scale2, names.down)
        for number, (scale, base) in enumerate(scales, start=1):
            factor_D = ours.get(f"blocks.{i}.scale{number}_D")
            if factor_D is None:
                continue
            if scale:
                theirs[f"{block}{scale}"] = factor_D
                continue
            for part in ("weight", "bias"):
                name = f"{block}{base}{part}"
                theirs[name] = scaled_rows((theirs[name], factor_D))
    take("norm", names.norm)
    take("pool.q", *names.pool_q)
    take("pool.kv", *names.pool_kv)
    take("pool.out", names.pool_out)
    take("pool.norm", names.pool_norm)
    take("pool.mlp.up", names.pool_up)
    take("pool.mlp.down", names.pool_down)
    take("head", names.head)
    for name, base in (("class_token_D", names.class_token), ("pool.probe_D", names.probe)):
        if name in ours:
            theirs[base] = ours[name][None, None]
    position_SD = _positions(ours, config)
    theirs[names.position] = position_SD if names.position.endswith(".weight") else position_SD[None]
    return {
        name if name.startswith(names.head) else f"{folder.prefix}{name}": t for name, t in theirs.items()
    }


def _positions(ours: Mapping[str, Tensor], config: ViTConfig) -> Tensor:
    """The table for each kind of position: there a class token has a row too."""
    if config.position == "learned":
        return ours["position_SD"]
    if config.position == "none":
        return torch.zeros(config.tokens(), config.width)
    if config.position != "sincos2d":
        raise UsageError(
            f"other libraries cannot express position={config.position!r}: `format` moe, torch or onnx can"
        )
    table = sincos2d(config.grid(), config.width, like=ours["norm.weight"])
    return torch.cat([table.new_zeros(config.tokens() - len(table), config.width), table])

"""Weights of JAX: big_vision, AugReg and vision_transformer, and V-MoE.

Kernels are stored (in, out), attention by heads, and norms have a scale. The GELU is by tanh.
"""

import re
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from moe.adapt import resize_position
from orchestrator.errors import UsageError
from wings.weights.kind import HALF, Facts, TensorNames, WeightsKind
from wings.weights.tensors import ForeignWeights, Lazy


def _read(opened: ForeignWeights) -> tuple[Mapping[str, Lazy], TensorNames, Facts]:
    names = [*opened.tensors]
    if any("conv_root/" in name for name in names):
        raise UsageError("a hybrid with a ResNet before the transformer (conv_root): the model here has none")
    theirs = unstacked(opened.tensors)
    body = "Transformer/" if any(name.startswith("Transformer/") for name in theirs) else "Encoder/"
    heads = heads_of(theirs)
    gate = next((n for n in theirs if n.endswith("Router/dense/kernel")), None)
    if gate and len(theirs[gate].shape) != 2:
        raise UsageError(f"{gate} is {theirs[gate].shape}: an ensemble (E3), which the model here is not")
    if any("Router/mu" in n for n in theirs):
        raise UsageError("a Soft MoE of JAX: none was released, and its slots are not read here")
    old = any("encoderblock_0/MultiHeadDotProductAttention_1/" in name for name in theirs)
    evaluation = {"eval_resize": "square", "eval_crop": 1.0}
    if gate:
        evaluation = {"eval_resize": "shorter", "eval_crop": 0.875}
    facts = Facts(
        heads=heads,
        gelu="tanh",
        mean=HALF[0],
        std=HALF[1],
        mean_stated=False,
        resize=lambda image, new: resize_position(
            image.flatten(2)[0].T, image.shape[-1], new, class_token=False
        ).T.view(1, -1, new, new),
        evaluation=evaluation,
        assumed=("its library's configs have a mean and std of 0.5, and this resize",),
    )
    return in_torch(theirs), names_of(theirs, body, old=old), facts


def heads_of(theirs: Mapping[str, Lazy]) -> int:
    """Returns the number of attention heads. Raises UsageError if there are no blocks."""
    query = next((n for n in theirs if re.search(r"encoderblock_0/.*/query/kernel$", n)), None)
    if query is None:
        raise UsageError(
            "there are no blocks as big_vision and V-MoE have them (encoderblock_0/../query/kernel)"
        )
    return theirs[query].shape[1]


def names_of(names: Mapping[str, Lazy], body: str, *, old: bool) -> TensorNames:
    """Returns the names as `in_torch` leaves them, with `body` before those of blocks."""
    position = next((n for n in names if n.endswith("pos_embedding")), f"{body}pos_embedding")
    block = f"{body}encoderblock_{{i}}/"
    attention = "MultiHeadDotProductAttention_1" if old else "MultiHeadDotProductAttention_0"
    if body == "Encoder/":
        attention = "SelfAttention"
    mlp = "MlpBlock_3" if old else "Mlp" if body == "Encoder/" else "MlpBlock_0"
    pool = "MAPHead_0/" if any(n.startswith("MAPHead_0/") for n in names) else "MapHead/"
    number = "_0" if pool == "MAPHead_0/" else ""
    pooled = f"{pool}MultiHeadDotProductAttention{number}/"
    pool_mlp = "MlpBlock_0" if number else "Mlp"
    return TensorNames(
        embed="embedding/",
        class_token="cls",
        position=position,
        block=block,
        norm1="LayerNorm_0/",
        qkv=tuple(f"{attention}/{part}/" for part in ("query", "key", "value")),
        out=f"{attention}/out/",
        norm_q=f"{attention}/query_ln/",
        norm_k=f"{attention}/key_ln/",
        norm2="LayerNorm_2/" if old else "LayerNorm_1/",
        up=f"{mlp}/Dense_0/",
        down=f"{mlp}/Dense_1/",
        experts_in="Moe/Mlp/Dense_0/",
        experts_out="Moe/Mlp/Dense_1/",
        gate="Moe/Router/dense/",
        norm=f"{body}encoder_norm/",
        pre_logits="pre_logits/",
        head="head/",
        probe=f"{pool}probe",
        pool_q=(f"{pooled}query/",),
        pool_kv=(f"{pooled}key/", f"{pooled}value/"),
        pool_norm_q=f"{pooled}query_ln/",
        pool_norm_k=f"{pooled}key_ln/",
        pool_out=f"{pooled}out/",
        pool_norm=f"{pool}LayerNorm{number}/",
        pool_up=f"{pool}{pool_mlp}/Dense_0/",
        pool_down=f"{pool}{pool_mlp}/Dense_1/",
    )


def unstacked(tensors: Mapping[str, Lazy]) -> dict[str, Lazy]:
    """Returns tensors of each block, also of those that hold all blocks along their first axis, as
    big_vision's scan=True does.
    """
    found: dict[str, Lazy] = {}
    for name, lazy in tensors.items():
        if "encoderblock/" not in name:
            found[name] = lazy
            continue
        for i in range(lazy.shape[0]):
            of_block = name.replace("encoderblock/", f"encoderblock_{i}/")
            found[of_block] = lazy.map("", lambda t, i=i: t[i])
    return found


def in_torch(theirs: Mapping[str, Lazy]) -> dict[str, Lazy]:
    """Returns tensors of single blocks with torch's words at the end of names, and torch's order of axes."""
    return {_dotted(name): _as_torch(name, lazy) for name, lazy in theirs.items()}


def _dotted(name: str) -> str:
    """The name with torch's words at its end."""
    return re.sub(r"(kernel|scale)$", "weight", name)


# How a kernel becomes torch's; experts keep (E, in, out).
TRANSPOSED: dict[str, Callable[[Tensor], Tensor]] = {
    r"(.*/)?embedding/kernel": lambda t: t.permute(3, 2, 0, 1),
    r".*/(query|key|value)/kernel": lambda t: t.flatten(1).T,
    r".*/(query|key|value)/bias": torch.flatten,
    r".*Attention\w*/out/kernel": lambda t: t.flatten(0, 1).T,
    r"(?!.*Moe/).*kernel": lambda t: t.T,
}


def _as_torch(name: str, lazy: Lazy) -> Lazy:
    of = next((of for pattern, of in TRANSPOSED.items() if re.fullmatch(pattern, name)), None)
    return lazy if of is None else lazy.map("", of)


KIND = WeightsKind(name="JAX", patches="embedding/kernel", read=_read)

"""A ViT of another project in our names: what each of our tensors is made of, and the config that follows.

Everything is decided on names and shapes, so that nothing is read of weights that are refused.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor

from moe.layer import MoEConfig
from moe.model import ModelConfig
from moe.models.vit import ViTConfig
from moe.routers import TokenChoiceConfig
from orchestrator.errors import UsageError
from wings.image_text.two_towers import TwoTowersConfig
from wings.weights.kind import HALF, Facts, TensorNames
from wings.weights.tensors import Lazy, combine, zero_tensor


@dataclass(frozen=True, kw_only=True)
class ImportPlan:
    """Our model, and what its tensors are made of.

    Attributes:
        left_out: names of the source that are not needed.
        made: names of ours that the source lacks -> what they are.
    """

    config: ViTConfig | TwoTowersConfig
    tensors: Mapping[str, Lazy]
    left_out: tuple[str, ...]
    made: Mapping[str, str]

    @property
    def vit(self) -> ViTConfig:
        """The model of images, or the image tower."""
        return vit_of(self.config)


def vit_of(config: ModelConfig) -> ViTConfig:
    """Returns the model of images of a config: itself, or its image tower."""
    return cast(ViTConfig, getattr(config, "image", config))


def plan_vit(
    tensors: Mapping[str, Lazy], names: TensorNames, facts: Facts, *, heads: int | None = None
) -> ImportPlan:
    """Plans a model at the source's own size of images.

    Args:
        heads: of attention, where the source does not say.

    Raises:
        UsageError: if a tensor is missing, left over or of a wrong shape.
    """
    return Planner(tensors, names, facts, heads).plan()


class Planner:
    """Maps the tensors of a transformer, block by block and layer by layer."""

    def __init__(
        self, tensors: Mapping[str, Lazy], names: TensorNames, facts: Facts, heads: int | None
    ) -> None:
        self.theirs, self.names, self.facts = tensors, names, facts
        if facts.heads and facts.heads_stated and heads not in (None, facts.heads):
            raise UsageError(f"`model.heads` {heads}: the weights have {facts.heads}")
        self.heads = heads or facts.heads
        self.ours: dict[str, Lazy] = {}
        self.made: dict[str, str] = {}
        self.has: dict[tuple[str, str], set[int]] = {}  # layer and part of it -> the blocks that have it

    def plan(self) -> ImportPlan:
        names = self.names
        embed = self.tensor(f"{names.embed}weight")
        if len(embed.shape) != 4 or embed.shape[1] != 3 or embed.shape[2] != embed.shape[3]:
            raise UsageError(
                f"the patch embedding is {embed.shape}, and ours reads square patches of 3 colours"
            )
        width, patch = embed.shape[0], embed.shape[2]
        if self.heads is None:
            raise UsageError("the weights do not say how many attention heads they have: set `model.heads`")
        if width % self.heads:
            raise UsageError(f"heads={self.heads} does not divide the width {width}")
        self.embedding(embed)
        depth = self.blocks()
        self.check_sizes(width=width, depth=depth, patch_size=patch)
        moe_blocks = [i for i in range(depth) if self.block(i)]
        self.check_blocks()
        self.linear("norm", names.norm, needs_bias=True)
        pooling = self.pooling()
        rows = self.positions(class_token=pooling == "token")
        if names.pre_logits and f"{names.pre_logits}weight" in self.theirs:
            self.linear("pre_logits", names.pre_logits)
        representation = self.ours["pre_logits.weight"].shape[0] if "pre_logits.weight" in self.ours else None
        self.head(representation or width)
        experts = self.ours[f"blocks.{moe_blocks[0]}.mlp.experts.w_in_EDF"] if moe_blocks else None
        dense = next((i for i in range(depth) if i not in moe_blocks), None)
        mlp_dim = (
            experts.shape[2]
            if dense is None and experts
            else self.ours[f"blocks.{dense}.mlp.up.weight"].shape[0]
        )
        grid = math.isqrt(rows - (pooling == "token"))
        classes = 0 if "head" in self.made else self.ours["head.weight"].shape[0]
        self.check_sizes(mlp_dim=mlp_dim, image_size=grid * patch, num_classes=classes)
        try:
            config = ViTConfig(
                image_size=grid * patch,
                patch_size=patch,
                width=width,
                depth=depth,
                heads=self.heads,
                mlp_dim=mlp_dim,
                num_classes=self.ours["head.weight"].shape[0],
                pooling=pooling,
                representation_size=representation,
                qk_norm="blocks.0.attention.norm_q.weight" in self.ours,
                gelu=self.facts.gelu,
                norm_eps=self.facts.norm_eps,
                moe=self.experts_config(experts, moe_blocks, mlp_dim),
            )
        except ValueError as error:
            raise UsageError(f"the tensors fit no model of ours: {error}") from None
        return ImportPlan(config=config, tensors=self.ours, left_out=self.check_all_used(), made=self.made)

    def blocks(self) -> int:
        """Returns the number of blocks. Raises UsageError if there is none."""
        block, depth = self.names.block, 0
        while f"{block.format(i=depth)}{self.names.norm1}weight" in self.theirs:
            depth += 1
        if not depth:
            raise UsageError(f"there is no block {block.format(i=0)}")
        return depth

    def check_all_used(self) -> tuple[str, ...]:
        """Returns the names that are harmless to leave out. Raises UsageError for others that are left over,
        and for numbers that are no weights.
        """
        if wrong := next((lazy for lazy in self.ours.values() if lazy.wrong), None):
            raise UsageError(
                f"{wrong.sources[0]} is {wrong.wrong}, and weights are float32, float16, bfloat16 or float64"
            )
        used = {source for lazy in self.ours.values() for source in lazy.sources}
        over = [name for name in self.theirs if not used.issuperset(self.theirs[name].sources)]
        harmless = [name for name in over if re.match(self.names.harmless, name)]
        if over := [name for name in over if name not in harmless]:
            more = f" and {len(over) - 5} more" if len(over) > 5 else ""
            raise UsageError(f"the model here has no place for {', '.join(over[:5])}{more}")
        return tuple(harmless)

    def tensor(self, name: str) -> Lazy:
        if name not in self.theirs:
            raise UsageError(f"there is no tensor {name}: the file is not whole, or of another model")
        return self.theirs[name]

    def linear(
        self, ours: str, *bases: str, scale: str = "", block: int | None = None, needs_bias: bool = False
    ) -> None:
        """Takes weight and bias of the layers `bases`, one below the other, scaled by row."""
        scaled = bool(scale) and scale in self.theirs
        for part in ("weight", "bias"):
            theirs = [f"{base}{part}" for base in bases]
            if part == "bias" and theirs[0] not in self.theirs:
                if needs_bias:
                    raise UsageError(
                        f"there is no tensor {theirs[0]}: the file is not whole, or of another model, such as"
                        " one with RMSNorm"
                    )
                self.ours[f"{ours}.bias"] = zero_tensor(self.ours[f"{ours}.weight"].shape[0])
                self.made[f"{ours}.bias"] = "zeros, as it has none"
                continue
            found = [self.tensor(name) for name in theirs]
            taken = found[0] if len(found) == 1 else combine("joined", _joined, found)
            if scaled:
                factor = self.tensor(scale)
                if taken.shape[:1] != factor.shape:
                    raise UsageError(f"{scale} is {factor.shape}, and {theirs[0]} {taken.shape}")
                taken = combine("scaled by LayerScale", scaled_rows, [taken, factor])
            self.ours[f"{ours}.{part}"] = taken
            if block is not None:
                for name in (part, "LayerScale") if scaled else (part,):
                    self.has.setdefault((ours.split(".", 2)[-1], name), set()).add(block)

    def check_blocks(self) -> None:
        """Raises UsageError if some blocks alone lack a tensor: it was lost."""
        for (layer, part), blocks in self.has.items():
            if lost := self.has[layer, "weight"] - blocks:
                raise UsageError(
                    f"block {min(lost)} has no {part} of {layer}, and others have: the file is not whole"
                )

    def check_sizes(self, **found: int) -> None:
        for name, value in found.items():
            if self.facts.sizes.get(name, value) != value:
                raise UsageError(
                    f"its config says {name}={self.facts.sizes[name]}, and the tensors have {value}: it is"
                    " another model's config"
                )

    def embedding(self, weight: Lazy) -> None:
        base, (mean, std) = (
            self.names.embed,
            self.facts.normalisation or HALF,
        )  # unknown: asked for when written
        bias = self.theirs.get(f"{base}bias")
        if bias is None:
            bias, self.made["embed.bias"] = zero_tensor(weight.shape[0]), "zeros, as it has none"
        if (mean, std) != HALF:
            how = "mean and std folded in"
            offset = combine(how, lambda pair: folded_bias(pair[0], pair[1], mean, std), [weight, bias])
            weight, bias = weight.map(how, lambda w: folded_weight(w, std)), offset
        self.ours |= {"embed.weight": weight, "embed.bias": bias}

    def block(self, i: int) -> bool:
        """Takes a block; returns whether it has experts."""
        names, ours = self.names, f"blocks.{i}"
        theirs = names.block.format(i=i)

        def named(*names: str) -> list[str]:
            return [f"{theirs}{name}" for name in names]

        self.linear(f"{ours}.norm1", *named(names.norm1), block=i, needs_bias=True)
        self.linear(f"{ours}.norm2", *named(names.norm2), block=i, needs_bias=True)
        self.linear(f"{ours}.attention.qkv", *named(*names.qkv), block=i)
        scales = [f"{theirs}{name}" if name else "" for name in (names.scale1, names.scale2)]
        self.linear(f"{ours}.attention.out", *named(names.out), scale=scales[0], block=i)
        for norm, name in (("norm_q", names.norm_q), ("norm_k", names.norm_k)):
            if name and f"{theirs}{name}weight" in self.theirs:
                self.ours[f"{ours}.attention.{norm}.weight"] = self.tensor(f"{theirs}{name}weight")
        if names.experts_in and f"{theirs}{names.experts_in}weight" in self.theirs:
            parts = {"w_in_EDF": f"{names.experts_in}weight", "b_in_EF": f"{names.experts_in}bias"}
            parts |= {"w_out_EFD": f"{names.experts_out}weight", "b_out_ED": f"{names.experts_out}bias"}
            self.ours |= {
                f"{ours}.mlp.experts.{part}": self.tensor(f"{theirs}{name}") for part, name in parts.items()
            }
            self.ours[f"{ours}.mlp.router.gate_DE"] = self.tensor(f"{theirs}{names.gate}weight")
            return True
        self.linear(f"{ours}.mlp.up", *named(names.up), block=i)
        self.linear(f"{ours}.mlp.down", *named(names.down), scale=scales[1], block=i)
        return False

    def experts_config(self, experts: Lazy | None, blocks: list[int], mlp_dim: int) -> MoEConfig | None:
        """With the routing of V-MoE's released configs, which checkpoints do not hold."""
        if experts is None:
            return None
        return MoEConfig(
            layers=tuple(blocks),
            num_experts=experts.shape[0],
            expert_dim=None if experts.shape[2] == mlp_dim else experts.shape[2],
            images_per_group=8,
            router=TokenChoiceConfig(
                k=2, capacity_factor=1.05, capacity_rounding="ceil", capacity_multiple_of=4
            ),
        )

    def pooling(self) -> Literal["gap", "token", "map"]:
        names = self.names
        has_token = bool(names.class_token) and names.class_token in self.theirs
        pooling: Literal["gap", "token", "map"] = "token" if has_token else "gap"
        if names.probe and names.probe in self.theirs and self.facts.pooling in (None, "map"):
            pooling = "map"
        if has_token and pooling == "map":
            raise UsageError("a class token beside attention pooling: the model here has one of them")
        if self.facts.pooling not in (None, pooling):
            raise UsageError(
                f"its config pools by {self.facts.pooling!r}, and its tensors are those of {pooling!r}: the"
                " model here cannot"
            )
        if pooling == "token":
            self.ours["class_token_D"] = self.tensor(names.class_token).map("", torch.flatten)
        if pooling == "map":
            self.ours["pool.probe_D"] = self.tensor(names.probe).map("", torch.flatten)
            self.attention_pooling()
        return pooling

    def attention_pooling(self) -> None:
        names = self.names
        if names.pool_in and f"{names.pool_in}weight" in self.theirs:
            for part in ("weight", "bias"):
                whole = self.tensor(f"{names.pool_in}{part}")
                width = whole.shape[0] // 3
                self.ours[f"pool.q.{part}"] = whole.map("split", lambda t, w=width: t[:w])
                self.ours[f"pool.kv.{part}"] = whole.map("split", lambda t, w=width: t[w:])
        else:
            self.linear("pool.q", *names.pool_q)
            self.linear("pool.kv", *names.pool_kv)
            if ("pool.q.bias" in self.made) != ("pool.kv.bias" in self.made):
                raise UsageError("queries or keys of the pooling lack their bias: the file is not whole")
        for norm, name in (("norm_q", names.pool_norm_q), ("norm_k", names.pool_norm_k)):
            if name and f"{name}weight" in self.theirs:
                self.ours[f"pool.{norm}.weight"] = self.tensor(f"{name}weight")
        self.linear("pool.out", names.pool_out)
        self.linear("pool.norm", names.pool_norm, needs_bias=True)
        self.linear("pool.mlp.up", names.pool_up)
        self.linear("pool.mlp.down", names.pool_down)

    def positions(self, *, class_token: bool) -> int:
        """Takes the position embedding; returns its rows."""
        name = self.names.position
        if name not in self.theirs:
            raise UsageError(
                f"there is no position embedding {name}: rotary or relative positions, which the model here"
                " has not"
            )
        found = self.theirs[name].map("", lambda t: t.reshape(-1, t.shape[-1]))
        rows = found.shape[0]
        if class_token and math.isqrt(rows) ** 2 == rows:
            found = found.map(
                "a row of zeros for the class token", lambda t: torch.cat([t.new_zeros(1, t.shape[1]), t])
            )
            rows += 1
        if math.isqrt(rows - class_token) ** 2 != rows - class_token:
            tokens = " and a class token" if class_token else ""
            raise UsageError(
                f"{name} has {rows} rows, which are no square grid{tokens}: registers, or oblong images"
            )
        self.ours["position_SD"] = found
        return rows

    def head(self, width: int) -> None:
        if f"{self.names.head}weight" in self.theirs:
            self.linear("head", self.names.head, needs_bias=True)
            return
        self.ours |= {"head.weight": zero_tensor(1, width), "head.bias": zero_tensor(1)}
        self.made["head"] = "new, of one class, as it has none"


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([*tensors])


def scaled_rows(pair: Sequence[Tensor]) -> Tensor:
    """Returns a weight (out, in), or a bias (out,), times a factor for each output."""
    weight, factor = pair
    return weight * (factor[:, None] if weight.ndim > 1 else factor)


def folded_weight(weight: Tensor, std: Sequence[float]) -> Tensor:
    """Kernel (D, 3, P, P) for pixels in -1..1 in place of (pixels in 0..1 - mean) / std."""
    by_channel = torch.tensor(std, dtype=torch.float64, device=weight.device).view(1, 3, 1, 1)
    return (weight.double() / (2 * by_channel)).float()


def folded_bias(weight: Tensor, bias: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """The bias beside `folded_weight`: patches have no padding, so the mean is a constant."""
    shift = torch.tensor([(0.5 - m) / s for m, s in zip(mean, std, strict=True)], dtype=torch.float64)
    shift = shift.to(weight.device).view(1, 3, 1, 1)
    return (bias.double() + (weight.double() * shift).sum((1, 2, 3))).float()

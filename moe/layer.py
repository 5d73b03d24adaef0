"""The MoE layer: a router assigns tokens to experts, experts compute, the router's weights combine."""

import re
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from moe.config import Config, DropoutRate, PositiveInt
from moe.dense import MLP, Activation
from moe.experts import Experts, chosen_alone, run_chosen
from moe.init import init_weights, mix, set_unsaved, split
from moe.overrides import AS_TRAINED, RoutingOverrides
from moe.routers import RouterConfig, TokenChoiceConfig

MAX_BLOCKS = 1 << 16
SHARED_SALT = -1  # of keys for dropout of the shared MLP; noise has the salts from 0


@dataclass(frozen=True, kw_only=True)
class MoEConfig(Config):
    """The MoE layers of a model: their position, their experts and their router.

    Attributes:
        layers: the MoE blocks, counted from 0: ``every_2`` (1, 3, 5, .., as V-MoE), ``last_<n>`` (the last n
            blocks, as Soft MoE), ``last_<n>_odd`` (the last n odd blocks, as V-MoE's Last-n), or indices.
        num_experts: experts of each MoE layer.
        images_per_group: number of images that are routed together and compete for capacity. Results depend
            on it, and not on the number of ranks.
        expert_dim: hidden units per expert; None: as many as the dense MLPs have.
        shared_dim: hidden units of an MLP beside the experts that every token passes through (the shared
            expert of DeepSeek-MoE, Dai et al. 2024, https://arxiv.org/abs/2401.06066); None: there is none.
        equal_init: all experts of a layer start from the same weights, as in V-MoE's released configs.
        expert_dropout: dropout after both layers of an expert, and of the shared MLP; V-MoE fine-tunes with
            0.1.
        residual: False removes the skip connection around the experts (Implicit Bias in Soft MoE, section
            4.4.1), so that a model cannot ignore them.
    """

    layers: tuple[int, ...] | str = "every_2"
    num_experts: PositiveInt = 8
    images_per_group: PositiveInt = 1
    router: RouterConfig = TokenChoiceConfig()
    expert_dim: PositiveInt | None = None
    shared_dim: PositiveInt | None = None
    equal_init: bool = False
    expert_dropout: DropoutRate = 0.0
    residual: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.layers, str) and not re.fullmatch(r"every_2|last_[1-9]\d*(_odd)?", self.layers):
            raise ValueError(
                f"layers must be every_2, last_<n>, last_<n>_odd or block indices, got {self.layers!r}"
            )

    def at_point(self, overrides: RoutingOverrides) -> "MoEConfig":
        """Returns the config with the overrides. Raises ValueError if the router has no such setting, refuses
        the value, or groups do not divide into smaller ones.
        """
        images = overrides.images_per_group or self.images_per_group
        if self.images_per_group % images:
            raise ValueError(f"images_per_group={images} does not divide the model's {self.images_per_group}")
        return replace(self, router=overrides.apply(self.router), images_per_group=images)

    def blocks(self, depth: int) -> tuple[int, ...]:
        """Indices of the MoE blocks of a model with `depth` blocks. Raises ValueError if there is no such
        block, or a block lies outside the model."""
        if self.layers == "every_2":
            found = tuple(range(1, depth, 2))
        elif isinstance(self.layers, str):
            count = int(self.layers.split("_")[1])
            among = range(1, depth, 2) if self.layers.endswith("odd") else range(depth)
            found = tuple(among[-count:]) if count <= len(among) else ()
        else:
            found = tuple(sorted(set(self.layers)))
        if not found or found[0] < 0 or found[-1] >= depth:
            raise ValueError(
                f"layers={self.layers!r} does not fit depth={depth}: blocks are 0 .. {depth - 1}"
            )
        return found


class MoELayer(nn.Module):
    """A router and its experts, in place of an MLP: (B, S, D) -> (B, S, D).

        block.mlp = MoELayer(MoEConfig(num_experts=8, router=SoftConfig()), dim=384, hidden=1536, block=3)

    The weights are those of block `block` of a `ViT` with this seed, so give each layer of a model its own
    number; router noise depends on it too. Without a seed, and on the meta device, they are not set. Of the
    config, `layers` and `residual` concern the model around the layer.

    Args:
        dim: length D of the vector of a token.
        hidden: hidden units of each expert, unless `config.expert_dim` has another number.
        block: position in the model.
        seed: the number from which the weights are drawn.
        activation: of the experts; ``exact_gelu`` beside timm's or Hugging Face's MLPs.
    """

    def __init__(
        self,
        config: MoEConfig,
        *,
        dim: int,
        hidden: int,
        block: int = 0,
        seed: int | None = 0,
        activation: Activation = "gelu",
    ) -> None:
        super().__init__()
        self.images_per_group = config.images_per_group
        self.block, self.dim = block, dim
        # A tensor: a number would be compiled in, and every layer would need a graph of its own.
        self.salt = torch.tensor(block, device="cpu")
        device, hidden = torch.get_default_device(), config.expert_dim or hidden
        # On the meta device torch's layers do not draw weights from the global generator.
        with torch.device("meta"):
            self.router = config.router.build(dim=dim, num_experts=config.num_experts)
            self.experts = Experts(
                config.num_experts,
                dim,
                hidden,
                activation=activation,
                dropout=config.expert_dropout,
                equal_init=config.equal_init,
            )
            self.shared = (
                MLP(dim, config.shared_dim, dropout=config.expert_dropout, activation=activation)
                if config.shared_dim
                else None
            )
        if device.type != "meta":
            self.to_empty(device=device)
            set_unsaved(self)
            if seed is not None:
                init_weights(self, seed, inside=f"blocks.{block}.mlp")
        self.uses_keys = config.expert_dropout > 0 or config.router.reads_keys

    def forward(
        self,
        x_BSD: Tensor,
        valid_B: Tensor | None = None,
        keys_B: Tensor | None = None,
        overrides: RoutingOverrides = AS_TRAINED,
        return_stats: bool = False,
        return_routing: bool = False,
    ) -> Any:
        """Routes groups of `images_per_group` consecutive images.

        Padding images (0 in `valid_B`) take no slots; None: all are valid. `keys_B` (int64) seed router noise
        and expert dropout; without keys there is neither.

        Returns:
            The output, (B, tokens per image, D). With `return_routing`, the output and the routing of the
            groups, whose `aux_G.mean()` is the auxiliary loss.

        Raises ValueError for a shape other than (B, S, D), and if the images do not fill the groups.
        """
        if x_BSD.ndim != 3 or x_BSD.shape[2] != self.dim:
            raise ValueError(f"tokens must be (B, S, D={self.dim}), got {tuple(x_BSD.shape)}")
        B, tokens, _ = x_BSD.shape
        valid_B = x_BSD.new_ones(B) if valid_B is None else valid_B
        together = overrides.images_per_group or self.images_per_group
        if B % together:
            raise ValueError(f"images_per_group={together} does not divide a batch of {B}")
        G = B // together
        x_GSD = x_BSD.reshape(G, together * tokens, -1)
        valid_GS = valid_B.unsqueeze(1).expand(-1, tokens).reshape(x_GSD.shape[:2])
        keys_GS = random_GS = None
        if keys_B is not None and self.uses_keys:
            keys_GS = split(mix(keys_B, self.salt), tokens).view(valid_GS.shape)
        if overrides.random_blocks and self.block in overrides.random_blocks:
            # Evaluation has no keys: the position in the batch seeds the random logits.
            first = overrides.first_group * together
            random_B = torch.arange(first, first + B, device=x_BSD.device) if keys_B is None else keys_B
            random_GS = split(mix(random_B, ~self.salt), tokens).view(valid_GS.shape)
        if overrides.subset_seed is not None:
            # Each layer draws subsets of its own.
            overrides = replace(overrides, subset_seed=overrides.subset_seed * MAX_BLOCKS + self.block)
        with in_own_precision(x_GSD.device.type):
            routing = self.router(x_GSD, valid_GS, keys_GS, overrides, random_GS, return_stats)
        if keys_B is None and (k := chosen_alone(self.experts, routing, overrides)):
            y_GSD = run_chosen(self.experts, routing, x_GSD, k)
        else:
            x_END = routing.dispatch(x_GSD)
            keys_EN = None
            if keys_GS is not None and self.experts.dropout:
                keys_EN = routing.keys(keys_GS, x_END)
            y_GSD = routing.combine(self.experts(x_END, keys_EN, routing.count_E))
        y_BSD = y_GSD.reshape(x_BSD.shape)
        if self.shared is not None:
            keys_BS = None if keys_GS is None else mix(keys_GS.reshape(B, tokens), SHARED_SALT)
            y_BSD = y_BSD + self.shared(x_BSD, keys_BS)
        return (y_BSD, routing) if return_routing else y_BSD


def filled(rows: Tensor, group: int) -> Tensor:
    """Returns whole groups of rows: these, and zeros behind them. An exported graph knows that they are
    whole, of any number of rows.
    """
    whole = group * ((rows.shape[0] + group - 1) // group)
    return torch.slice_scatter(rows.new_zeros(whole, *rows.shape[1:]), rows, 0, 0, rows.shape[0])


def in_own_precision(device: str) -> AbstractContextManager[Any]:
    """Returns a context in which autocast is off: routers compute in float32. Without autocast it is empty,
    so that exported graphs have no trace of it.
    """
    known = torch.amp.is_autocast_available(device)
    on = known and torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if on else nullcontext()

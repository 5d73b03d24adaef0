"""Dense mixtures: every expert processes every token, and the router only weighs their outputs.

Source: the calmops article "SoftMoE: Beyond Hard Expert Selection". Its code does not run; the variants here
follow its text. A mixture of n experts does n times the work of one expert, has no slots, and is not Soft
MoE.
"""

import math
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe.config import Bound, PositiveFloat, PositiveInt
from moe.init import Draw, constant, lecun_normal, mix
from moe.overrides import AS_TRAINED, RoutingOverrides
from moe.routers.affinity import gate_logits
from moe.routing import DenseRouting, LayerShape, Router, RouterConfig, at_least_fp32, routing_stats


@dataclass(frozen=True, kw_only=True)
class MixtureConfig(RouterConfig):
    """A dense mixture.

    Attributes:
        level: ``token``: each token weighs the experts; ``image``: the mean token of a routing group weighs
            them for all its tokens (a group is an image if images_per_group is 1); ``hierarchical``: each
            token weighs `clusters` of experts, and then the experts within each cluster.
        clusters: groups of experts of a hierarchical mixture.
        gate: logits by one matrix (``linear``), or by two with SiLU between them (``mlp``), as in the
            article's optimised layer.
        scale_inputs: experts see tokens times their weight, f(w x), as the article's formula has it.
        temperature, temperature_decay, temperature_min: logits are divided by
            max(temperature_min, temperature * temperature_decay ** step); a decay below 1 sharpens the
            mixture; the article has 0.99.
        learn_temperature: logits are divided by a learned temperature, which starts at `temperature` and is
            the exponential of its parameter; the article's starts at e.
    """

    kind: Literal["mixture"] = "mixture"
    level: Literal["token", "image", "hierarchical"] = "token"
    clusters: PositiveInt = 2
    gate: Literal["linear", "mlp"] = "linear"
    scale_inputs: bool = False
    learn_temperature: bool = False
    temperature: PositiveFloat = 1.0
    temperature_decay: Annotated[float, Bound(">", 0), Bound("<=", 1)] = 1.0
    temperature_min: PositiveFloat = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperature < self.temperature_min:
            raise ValueError(
                f"temperature={self.temperature} is below temperature_min={self.temperature_min};"
                " lower temperature_min too"
            )
        if self.learn_temperature and self.temperature_decay < 1:
            raise ValueError(
                f"temperature_decay={self.temperature_decay} and a learned temperature exclude each other"
            )

    def build(self, *, dim: int, num_experts: int) -> "MixtureRouter":
        return MixtureRouter(self, dim=dim, num_experts=num_experts)

    def slots(self, *, num_tokens: int, num_experts: int) -> int:
        """Returns C: every expert has room for every token."""
        if self.level == "hierarchical" and num_experts % self.clusters:
            raise ValueError(f"clusters={self.clusters} does not divide num_experts={num_experts}")
        return num_tokens

    def leaks_future(self, *, num_tokens: int, num_experts: int) -> str:
        return "level='image' weighs experts by the mean of all tokens" if self.level == "image" else ""

    def gate_macs(self, layer: LayerShape) -> float:
        rows = 1 / layer.images if self.level == "image" else layer.tokens
        hidden = layer.dim if self.gate == "mlp" else 0
        clusters = self.clusters if self.level == "hierarchical" else 0
        return rows * layer.dim * (layer.experts + hidden + clusters)

    def mix_macs(self, layer: LayerShape, kept: int) -> float:
        return layer.tokens * kept * layer.dim  # one matmul combines; dispatch copies no token

    def saved(self, layer: LayerShape) -> tuple[float, float]:
        return layer.rows(), layer.tokens * layer.experts

    def temperature_at(self, step: int) -> float:
        """Returns the temperature of update `step`, counted from 0."""
        return max(self.temperature_min, self.temperature * self.temperature_decay**step)


class MixtureRouter(Router):
    """The router; its temperature is a buffer that `before_step` changes and checkpoints keep."""

    temperature: Tensor

    def __init__(self, config: MixtureConfig, *, dim: int, num_experts: int) -> None:
        super().__init__()
        self.config = config
        if config.gate == "mlp":
            self.gate_DD = nn.Parameter(torch.empty(dim, dim))
        self.gate_DE = nn.Parameter(torch.empty(dim, num_experts))
        if config.learn_temperature:
            self.log_temperature = nn.Parameter(torch.empty(1))
        if config.level == "hierarchical":
            self.gate_clusters = nn.Parameter(torch.empty(dim, config.clusters))
        self.register_buffer("temperature", torch.empty(1))

    def draws(self) -> dict[str, Draw]:
        gate = lecun_normal(self.gate_DE.shape[0])
        temperature = constant(self.config.temperature_at(0))
        logarithm = constant(math.log(self.config.temperature))
        return {
            "gate_DD": gate,
            "gate_DE": gate,
            "gate_clusters": gate,
            "temperature": temperature,
            "log_temperature": logarithm,
        }

    def before_step(self, step: int) -> None:
        """Sets the temperature of update `step`."""
        self.temperature.fill_(self.config.temperature_at(step))

    def forward(
        self,
        x_GSD: Tensor,
        valid_GS: Tensor,
        keys_GS: Tensor | None = None,
        overrides: RoutingOverrides = AS_TRAINED,
        random_GS: Tensor | None = None,
        return_stats: bool = True,
    ) -> DenseRouting:
        G, S, _ = x_GSD.shape
        E = self.gate_DE.shape[1]
        config = overrides.apply(self.config)
        config.slots(num_tokens=S, num_experts=E)
        x_GSD = at_least_fp32(x_GSD)
        valid_GS1 = valid_GS.to(x_GSD.dtype).unsqueeze(-1)
        if config.level == "image":
            x_GSD = (x_GSD * valid_GS1).sum(1, keepdim=True) / valid_GS1.sum(1, keepdim=True).clamp(min=1)
            random_GS = None if random_GS is None else random_GS[:, :1]
        temperature = self.log_temperature.exp() if config.learn_temperature else self.temperature
        gate_input_GSD = F.silu(x_GSD @ at_least_fp32(self.gate_DD)) if config.gate == "mlp" else x_GSD
        logits_GSE = gate_logits(gate_input_GSD, self.gate_DE, random_GS)
        if config.level == "hierarchical":
            random_clusters_GS = None if random_GS is None else mix(random_GS, E)
            cluster_GSQ = gate_logits(x_GSD, self.gate_clusters, random_clusters_GS)
            gates_GSE = hierarchical(logits_GSE / temperature, cluster_GSQ / temperature)
        else:
            gates_GSE = (logits_GSE / temperature).softmax(-1).expand(G, S, E)
        load_GE = (gates_GSE.detach() * valid_GS1).sum(1)
        kept_GE = overrides.kept(load_GE)
        routing = DenseRouting(
            weight_GSE=gates_GSE if kept_GE is None else gates_GSE * kept_GE.unsqueeze(1),
            gates_GSE=gates_GSE,
            aux_G=gates_GSE.new_zeros(G),
            kept_GE=kept_GE,
            scale_inputs=config.scale_inputs,
        )
        if not return_stats:
            return routing
        all_GS = torch.full_like(valid_GS, E, dtype=torch.float32)
        stats = routing_stats(
            gates_GSE=gates_GSE, load_GE=load_GE, chosen_GS=all_GS, seats_GS=all_GS, valid_GS=valid_GS
        )
        return replace(routing, load_GE=load_GE, stats=stats)


def hierarchical(logits_GSE: Tensor, cluster_GSQ: Tensor) -> Tensor:
    """Returns softmax over clusters x softmax within clusters.

    It equals the flat softmax if each cluster's logit is the log-sum-exp of its experts' logits.
    """
    within_GSQE = logits_GSE.unflatten(-1, (cluster_GSQ.shape[-1], -1)).softmax(-1)
    return (cluster_GSQ.softmax(-1).unsqueeze(-1) * within_GSQE).flatten(-2)

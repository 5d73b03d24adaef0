"""The routers by config type. To add one: write its file, add its line and its name in the union."""

from torch import nn

from moe.routers.expert_choice import ExpertChoiceConfig, ExpertChoiceRouter
from moe.routers.soft import SoftConfig, SoftRouter
from moe.routers.token_choice import TokenChoiceConfig, TokenChoiceRouter

RouterConfig = TokenChoiceConfig | ExpertChoiceConfig | SoftConfig

ROUTERS: dict[type, type[nn.Module]] = {
    TokenChoiceConfig: TokenChoiceRouter,
    ExpertChoiceConfig: ExpertChoiceRouter,
    SoftConfig: SoftRouter,
}


def build_router(config: RouterConfig, *, dim: int, num_experts: int) -> nn.Module:
    """A module with ``forward(x_GSD, valid_GS) -> Routing``; its weights await `init_weights`."""
    return ROUTERS[type(config)](config, dim=dim, num_experts=num_experts)

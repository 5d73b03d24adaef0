"""The routers. To add one, write its file and import its config here: it joins `RouterConfig` by its kind."""

from moe.routers.expert_choice import ExpertChoiceConfig
from moe.routers.hash import HashConfig
from moe.routers.mixture import MixtureConfig
from moe.routers.relu import ReLUConfig
from moe.routers.soft import SoftConfig
from moe.routers.token_choice import TokenChoiceConfig
from moe.routers.top_k import TopKConfig
from moe.routing import RouterConfig

__all__ = [
    "ExpertChoiceConfig",
    "HashConfig",
    "MixtureConfig",
    "ReLUConfig",
    "RouterConfig",
    "SoftConfig",
    "TokenChoiceConfig",
    "TopKConfig",
]

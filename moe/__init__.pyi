from .config import (
    Fraction as Fraction,
)
from .config import (
    NonNegativeFloat as NonNegativeFloat,
)
from .config import (
    PositiveFloat as PositiveFloat,
)
from .config import (
    PositiveInt as PositiveInt,
)
from .cost import (
    forward_gflops_2mac as forward_gflops_2mac,
)
from .cost import (
    num_params as num_params,
)
from .cost import (
    train_flops_6mac as train_flops_6mac,
)
from .dense import MLP as MLP
from .dense import Head as Head
from .exported import load as load
from .exported import load_signature as load_signature
from .init import (
    Draw as Draw,
)
from .init import (
    constant as constant,
)
from .init import (
    gaussian as gaussian,
)
from .init import (
    init_weights as init_weights,
)
from .init import (
    lecun_normal as lecun_normal,
)
from .init import (
    split as split,
)
from .layer import MoEConfig as MoEConfig
from .layer import MoELayer as MoELayer
from .model import (
    Model as Model,
)
from .model import (
    ModelConfig as ModelConfig,
)
from .model import (
    Output as Output,
)
from .model import (
    UnitOutput as UnitOutput,
)
from .model import (
    with_experts as with_experts,
)
from .model import (
    without_experts as without_experts,
)
from .models import ViT as ViT
from .models import ViTConfig as ViTConfig
from .overrides import AS_TRAINED as AS_TRAINED
from .overrides import RoutingOverrides as RoutingOverrides
from .parallel import gather as gather
from .presets import PRESETS as PRESETS
from .presets import create_model as create_model
from .presets import preset as preset
from .router_state import after_batch as after_batch
from .router_state import before_step as before_step
from .routers import (
    ExpertChoiceConfig as ExpertChoiceConfig,
)
from .routers import (
    HashConfig as HashConfig,
)
from .routers import (
    MixtureConfig as MixtureConfig,
)
from .routers import (
    ReLUConfig as ReLUConfig,
)
from .routers import (
    SoftConfig as SoftConfig,
)
from .routers import (
    TokenChoiceConfig as TokenChoiceConfig,
)
from .routers import (
    TopKConfig as TopKConfig,
)
from .routers.affinity import (
    SinkhornConfig as SinkhornConfig,
)
from .routers.affinity import (
    SoftmaxConfig as SoftmaxConfig,
)
from .routers.affinity import (
    SparseTransportConfig as SparseTransportConfig,
)
from .routers.balance import (
    BalanceConfig as BalanceConfig,
)
from .routers.balance import (
    QuantileConfig as QuantileConfig,
)
from .routers.balance import (
    SignConfig as SignConfig,
)
from .routers.choice import (
    CapacityConfig as CapacityConfig,
)
from .routers.choice import (
    best_of as best_of,
)
from .routers.choice import (
    gather_routing as gather_routing,
)
from .routers.expert_choice import best_tokens as best_tokens
from .routing import (
    GatherRouting as GatherRouting,
)
from .routing import (
    Router as Router,
)
from .routing import (
    RouterConfig as RouterConfig,
)
from .routing import (
    SoftRouting as SoftRouting,
)
from .routing import (
    at_least_fp32 as at_least_fp32,
)
from .signature import Signature as Signature

from .config import (
    Fraction as Fraction,
    NonNegativeFloat as NonNegativeFloat,
    PositiveFloat as PositiveFloat,
    PositiveInt as PositiveInt,
)
from .cost import (
    forward_gflops_2mac as forward_gflops_2mac,
    num_params as num_params,
    train_flops_6mac as train_flops_6mac,
)
from .dense import MLP as MLP, Head as Head
from .exported import load as load, load_signature as load_signature
from .init import (
    Draw as Draw,
    constant as constant,
    gaussian as gaussian,
    init_weights as init_weights,
    lecun_normal as lecun_normal,
    split as split,
)
from .layer import MoEConfig as MoEConfig, MoELayer as MoELayer
from .model import (
    ImageModelConfig as ImageModelConfig,
    Model as Model,
    ModelConfig as ModelConfig,
    Output as Output,
    UnitOutput as UnitOutput,
    with_experts as with_experts,
    without_experts as without_experts,
)
from .models import ViT as ViT, ViTConfig as ViTConfig
from .overrides import AS_TRAINED as AS_TRAINED, RoutingOverrides as RoutingOverrides
from .parallel import gather as gather
from .presets import PRESETS as PRESETS, create_model as create_model, preset as preset
from .router_state import after_batch as after_batch, before_step as before_step
from .routers import (
    ExpertChoiceConfig as ExpertChoiceConfig,
    HashConfig as HashConfig,
    MixtureConfig as MixtureConfig,
    ReLUConfig as ReLUConfig,
    SoftConfig as SoftConfig,
    TokenChoiceConfig as TokenChoiceConfig,
    TopKConfig as TopKConfig,
)
from .routers.affinity import (
    SinkhornConfig as SinkhornConfig,
    SoftmaxConfig as SoftmaxConfig,
    SparseTransportConfig as SparseTransportConfig,
)
from .routers.balance import (
    BalanceConfig as BalanceConfig,
    QuantileConfig as QuantileConfig,
    SignConfig as SignConfig,
)
from .routers.choice import (
    CapacityConfig as CapacityConfig,
    best_of as best_of,
    gather_routing as gather_routing,
)
from .routers.expert_choice import best_tokens as best_tokens
from .routing import (
    GatherRouting as GatherRouting,
    Router as Router,
    RouterConfig as RouterConfig,
    RoutingInput as RoutingInput,
    SoftRouting as SoftRouting,
    Statistic as Statistic,
    at_least_fp32 as at_least_fp32,
)
from .signature import Signature as Signature

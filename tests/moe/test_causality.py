"""A router's config says whether tokens depend on later ones, and its outputs show that it is so."""

import pytest
import torch

from moe.layer import MoEConfig, MoELayer
from moe.routers import ExpertChoiceConfig, MixtureConfig, RouterConfig, SoftConfig, TokenChoiceConfig
from moe.routers.affinity import SinkhornConfig, SparseTransportConfig
from tests.moe.parts import randn
from tests.moe.test_routers import VARIANTS, changed

S, D, E = 16, 8, 4
SINKHORN = SinkhornConfig(iterations=30)
MORE = (
    TokenChoiceConfig(capacity_factor=0.5),
    TokenChoiceConfig(capacity_factor=E),
    TokenChoiceConfig(capacity_factor=0.5, priority="max"),
    TokenChoiceConfig(capacity_factor=E, priority="max"),
    TokenChoiceConfig(k=2),
    TokenChoiceConfig(k=2, topk="before", capacity_factor=2.0),
    TokenChoiceConfig(k=E, capacity_factor=1.0),
    TokenChoiceConfig(affinity=SINKHORN, capacity_factor=E),
    TokenChoiceConfig(affinity=SINKHORN, k=E),
    TokenChoiceConfig(affinity=SINKHORN, k=E, combine="affinity"),
    ExpertChoiceConfig(capacity_factor=E),
    ExpertChoiceConfig(capacity_factor=E, affinity=SINKHORN),
    ExpertChoiceConfig(capacity_factor=E, affinity=SINKHORN, combine="affinity"),
    ExpertChoiceConfig(capacity_factor=E, affinity=SparseTransportConfig(iterations=30)),
    SoftConfig(total_slots=S, dispatch="identity", combine="identity"),
    SoftConfig(total_slots=S, dispatch="identity"),
    SoftConfig(total_slots=S, combine="identity"),
    SoftConfig(dispatch="uniform", combine="uniform"),
    *(MixtureConfig(level=level) for level in ("token", "image", "hierarchical")),
)


def depends_on_later(router: RouterConfig) -> bool:
    """Whether the last token changes the output of another one, for any of several draws."""
    for seed in range(20):
        layer = MoELayer(MoEConfig(num_experts=E, router=router), dim=D, hidden=8, seed=seed).eval()
        x = randn(1, S, D, seed=seed)
        other = torch.cat([x[:, :-1], randn(1, 1, D, seed=seed + 1000)], 1)
        if not torch.allclose(layer(x)[:, :-1], layer(other)[:, :-1], rtol=1e-4, atol=1e-6):
            return True
    return False


def fits(router: RouterConfig) -> bool:
    try:
        router.eval_config().leaks_future(num_tokens=S, num_experts=E)
    except ValueError:  # not for these sizes
        return False
    return True


@pytest.mark.parametrize("router", filter(fits, dict.fromkeys(VARIANTS + MORE)), ids=changed)
def test_a_config_says_whether_it_leaks_the_future(router: RouterConfig) -> None:
    says = router.eval_config().leaks_future(num_tokens=S, num_experts=E)
    assert depends_on_later(router) == bool(says), says or "it says that no token depends on later ones"


def test_what_it_advises() -> None:
    leaks = TokenChoiceConfig(k=2).leaks_future(num_tokens=S, num_experts=E)
    assert leaks == (
        "with k=2 the second choice of a token is seated after the first choices of later tokens: use k=1, or"
        " capacity_factor=2, which drops no token"
    )

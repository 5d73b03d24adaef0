"""The decoder: its costs, and that no byte of its output depends on later bytes of its input."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from moe.codec import from_dict, to_dict
from moe.cost import num_params
from moe.layer import MoEConfig
from moe.model import ModelConfig
from moe.parallel import build_sharded, build_whole
from moe.routers import (
    ExpertChoiceConfig,
    HashConfig,
    MixtureConfig,
    RouterConfig,
    SoftConfig,
    TokenChoiceConfig,
)
from moe.routers.affinity import SinkhornConfig
from moe.trace import trace
from tests.moe.parity import one_rank
from wings.language.decoder import BYTES, Decoder, DecoderConfig

L, E = 16, 4
DENSE = DecoderConfig(length=L, width=16, depth=2, heads=2, mlp_dim=32)
NO_LIMIT = {  # no token is dropped, so that a prefix has the same room
    "k=1": TokenChoiceConfig(k=1, capacity_factor=E),
    "k=2": TokenChoiceConfig(k=2, capacity_factor=E / 2),
    "mixture": MixtureConfig(),
}
SAFE: dict[str, RouterConfig] = {
    **NO_LIMIT,
    "capacity": TokenChoiceConfig(k=1, capacity_factor=0.5),
    "hash": HashConfig(by="content", capacity_factor=0.5),
}
REFUSED: dict[str, tuple[RouterConfig, str]] = {
    "soft": (SoftConfig(slots_per_expert=4), r"\(soft\) is not: slots are mixes of all tokens"),
    "expert choice": (ExpertChoiceConfig(), r"\(expert_choice\) is not: experts pick the best tokens"),
    "second choices": (TokenChoiceConfig(k=2), r"\(token_choice\) is not: with k=2 the second choice"),
    "priority": (TokenChoiceConfig(priority="max"), r"\(token_choice\) is not: priority='max' seats"),
    "sinkhorn": (
        TokenChoiceConfig(affinity=SinkhornConfig()),
        r"\(token_choice\) is not: the transport plan balances",
    ),
    "image": (MixtureConfig(level="image"), r"\(mixture\) is not: level='image'"),
}


def moe_of(router: RouterConfig) -> MoEConfig:
    return MoEConfig(num_experts=E, layers="last_1", router=router)


def live(config: DecoderConfig) -> Decoder:
    """A model in float64 whose head is not zero."""
    model = config.build().double().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for param in (model.head.weight, model.position_LD, model.embed_VD):
            param.copy_(torch.randn(param.shape, generator=generator))
    return model


def text(seed: int, count: int = 3) -> torch.Tensor:
    return torch.randint(BYTES, (count, L), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


def moved(config: DecoderConfig) -> tuple[float, float]:
    """The largest change of an output before and after a place behind which all bytes change."""
    model, bytes_BL = live(config), text(0)
    changed = torch.cat([bytes_BL[:, :6], text(1)[:, 6:]], 1)
    with torch.no_grad():
        difference = (model(bytes_BL).heads["next_byte"] - model(changed).heads["next_byte"]).abs()
    return float(difference[:, :6].max()), float(difference[:, 6:].max())


@pytest.mark.parametrize("router", [None, *SAFE.values()], ids=["dense", *SAFE])
def test_the_past_does_not_move_with_the_future(router: RouterConfig | None) -> None:
    before, after = moved(replace(DENSE, moe=router and moe_of(router)))
    assert before == 0
    assert after > 0.1


@pytest.mark.parametrize(("router", "why"), REFUSED.values(), ids=REFUSED)
def test_the_past_moves_under_routers_that_are_refused(router: RouterConfig, why: str) -> None:
    with pytest.raises(ValueError, match=f"the model is causal, and its router {why}"):
        replace(DENSE, moe=moe_of(router))

    class Unchecked(DecoderConfig):
        def __post_init__(self) -> None:
            pass

    sizes: dict[str, Any] = {name: getattr(DENSE, name) for name in ("length", "width", "depth", "heads")}
    before, _ = moved(Unchecked(**sizes, mlp_dim=32, moe=moe_of(router)))
    assert before > 1e-4


@pytest.mark.parametrize("router", [None, *NO_LIMIT.values()], ids=["dense", *NO_LIMIT])
def test_a_prefix_alone_has_the_outputs_of_the_whole(router: RouterConfig | None) -> None:
    model, bytes_BL = live(replace(DENSE, moe=router and moe_of(router))), text(0)
    with torch.no_grad():
        whole = model(bytes_BL).heads["next_byte"]
        for end in range(1, L + 1):
            alone = model(bytes_BL[:, :end]).heads["next_byte"]
            torch.testing.assert_close(alone[:, -1], whole[:, end - 1], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("router", [None, *SAFE.values()], ids=["dense", *SAFE])
def test_costs_and_gradients(router: RouterConfig | None) -> None:
    config = replace(DENSE, moe=router and moe_of(router))
    assert sum(config.costs().macs.values()) == pytest.approx(sum(trace(config).macs.values()))
    assert len(config.costs().activations.saved) == 1 + config.depth
    model = config.build()
    assert num_params(config) == sum(param.numel() for param in model.parameters())
    output = model(text(0), keys_B=torch.arange(3), return_stats=True)
    assert output.heads["next_byte"].shape == (3, L, BYTES)
    assert not output.heads["next_byte"].any()  # a byte is uniform at first
    torch.nn.init.normal_(model.head.weight)
    (model(text(0)).heads["next_byte"].square().sum() + output.aux).backward()
    for name, param in model.named_parameters():
        assert param.grad is not None, name
    assert from_dict(ModelConfig, to_dict(config)) == config


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_it_is_sharded_and_rounded(dtype: torch.dtype | None) -> None:
    config, found = replace(DENSE, moe=moe_of(SAFE["capacity"])), []
    with one_rank("cpu") as mesh:
        for model in (
            build_sharded(config, mesh, seed=0, compute_dtype=dtype),
            build_whole(config, torch.device("cpu"), seed=0, compute_dtype=dtype),
        ):
            torch.nn.init.ones_(model.get_parameter("head.bias"))
            found.append(model(text(0)).heads["next_byte"])
    assert found[0].dtype == torch.float32
    assert found[0].any()
    assert torch.equal(*found)


def test_refuses() -> None:
    with pytest.raises(ValueError, match="routed one by one, got images_per_group=2"):
        replace(DENSE, moe=replace(moe_of(SAFE["k=1"]), images_per_group=2))
    with pytest.raises(ValueError, match="heads=3 does not divide width=16"):
        replace(DENSE, heads=3)

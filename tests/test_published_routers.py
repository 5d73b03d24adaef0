"""The one-line settings of docs/routers.md compute what the systems that they name compute."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moe.routers import ReLUConfig, TopKConfig
from moe.routers.balance import SignConfig
from orchestrator.codec import override
from orchestrator.config import RunConfig
from tests.golden import FAMILIES, family_of
from tests.golden_report import Report
from tests.moe.parts import GOLDENS, read_golden

PAGE = (Path(__file__).parents[1] / "docs/routers.md").read_text()
LINES = {name: sets for sets, name in re.findall(r"^--set (.+?)  # (.+)$", PAGE, re.MULTILINE)}
GOLDENS_OF = {
    "DeepSeek-V3": (
        "gate__sigmoid_k2_bias_scale2p5",
        "loss_free__sign_1rank",
        "shared__plain",
        "dropless__k2",
    ),
    "Qwen3": ("gate__softmax_k2_renormalised", "balance_loss__softmax_k2_padding"),
    "OLMoE": ("gate__softmax_k2_plain_bias", "balance_loss__softmax_k1", "z_loss__plain"),
    "torchtitan": (
        "gate__sigmoid_k3_no_norm",
        "loss_free__sign_centred_2ranks_2micro",
        "dropless__k1_empty_expert_align8",
    ),
    "Tutel cosine": ("cosine__tutel_projection",),
    "ReMoE": ("relu__dense_to_sparse",),
}
# The scale is a last factor, which some files leave at 1; loss_free has normalised weights in all.
NOT_OF_THE_SYSTEM = {
    "shared__plain": ("scale",),
    "loss_free__sign_1rank": ("scale",),
    "dropless__k2": ("scale",),
}
NOT_OF_THE_SYSTEM |= {"loss_free__sign_centred_2ranks_2micro": ("normalise",)}


def config_of(name: str) -> RunConfig:
    changes = dict(pair.split("=") for pair in LINES[name].split())
    return override(RunConfig(), {"model.moe.images_per_group": 4} | changes)


def fields_of(name: str) -> dict[str, Any]:
    """The fields of the line in the words of the files."""
    router = config_of(name).model.moe.router  # pyright: ignore[reportOptionalMemberAccess]
    if isinstance(router, ReLUConfig):
        return {"coefficient_init": router.coefficient, "multiplier": router.factor}
    assert isinstance(router, TopKConfig)
    found = {"score": router.score, "normalise": router.normalise, "scale": router.scale}
    if isinstance(router.balance, SignConfig):
        found["centre"] = router.balance.centre
    return found


def test_every_line_is_compared():
    assert LINES.keys() == GOLDENS_OF.keys()


@pytest.mark.parametrize(("name", "case"), [(name, case) for name in GOLDENS_OF for case in GOLDENS_OF[name]])
def test_line_computes_the_golden(name, case):
    """The file's inputs through the line's score, weights, bias and factors, at the file's sizes."""
    arrays, meta = read_golden(GOLDENS / f"{case}.npz")
    fields = {n: v for n, v in fields_of(name).items() if n not in NOT_OF_THE_SYSTEM.get(case, ())}
    used = {n: v for n, v in fields.items() if n in meta["config"]}
    assert used or case.startswith("z_loss")
    meta["config"] |= used
    report = Report()
    FAMILIES[family_of(Path(f"{case}.npz"))](arrays, meta, report)
    assert not report.failed(), str(report)


@pytest.mark.parametrize("name", GOLDENS_OF)
def test_line_makes_a_model(name):
    config = config_of(name).model
    with torch.device("meta"):
        model = config.build(seed=None)
    assert model(torch.empty(4, 3, 8, 8, device="meta")).logits.shape == (4, 10)


def test_language_models_drop_nothing():
    for name in ("DeepSeek-V3", "Qwen3", "OLMoE", "torchtitan"):
        model = replace(config_of(name).model, width=8).build()
        stats = model(torch.randn(4, 3, 8, 8), return_stats=True).stats
        assert stats["dropped_frac"].eq(0).all(), name
        assert stats["seats_mean"].eq(model.config.moe.router.k).all(), name  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]


def test_temperatures_and_rates_are_the_published_ones():
    tutel, titan = (config_of(name).model.moe.router for name in ("Tutel cosine", "torchtitan"))  # pyright: ignore[reportOptionalMemberAccess]
    assert isinstance(tutel, TopKConfig)
    assert isinstance(titan, TopKConfig)
    assert (tutel.projection, tutel.temperature) == (256, 0.5)
    assert titan.balance == SignConfig(rate=1e-3)
    remoe = config_of("ReMoE").model.moe.router  # pyright: ignore[reportOptionalMemberAccess]
    assert remoe == ReLUConfig(coefficient=1e-8, factor=1.2, capacity_factor=8)
    assert remoe.slots(num_tokens=64, num_experts=8) == 64, "an expert has room for all tokens"

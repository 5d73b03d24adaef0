"""One pass over all images: what it counts, and what it does not."""

import pytest
import torch

from moe.overrides import RoutingOverrides
from moe.routers import (
    ROUTERS,
    ExpertChoiceConfig,
    MixtureConfig,
    SoftConfig,
    TokenChoiceConfig,
)
from moe.routers.affinity import SinkhornConfig, SparseTransportConfig
from orchestrator.data.batch import Batch
from orchestrator.data.images import normalize
from orchestrator.evaluation.microscope.survey import Survey, survey

ALL = [
    *(kind() for kind in ROUTERS),
    TokenChoiceConfig(k=2, affinity=SinkhornConfig()),
    ExpertChoiceConfig(affinity=SinkhornConfig()),
    ExpertChoiceConfig(affinity=SparseTransportConfig(iterations=20)),
    MixtureConfig(level="image"),
]
each_router = pytest.mark.parametrize(
    "router", ALL, ids=lambda r: f"{r.kind}-{getattr(r, 'affinity', '')}"[:40]
)
FIRM = (0.0, 0.5, 8.0)


def looked(model, batches, sigmas: tuple[float, ...] = (0.0, 1.0)) -> Survey:
    blocks = model.config.moe_blocks()
    return survey(model, batches, blocks=blocks, classes=10, report=lambda images: None, sigmas=sigmas)


def figures(found: Survey) -> list[float]:
    flat = [found.images, found.acc]
    for layer in found.layers:
        flat += [layer.contribution, layer.acc_random, layer.mutual_information(), *(layer.flips or ())]
        flat += layer.tally.experts_frac().tolist() + layer.tally.mean_by_class().flatten().tolist()
        flat += layer.slots.dispatch.tolist() if layer.slots else []
    return flat


@each_router
def test_padding_counts_nowhere(build_vit, noise_batch, router):
    """Four images as a batch, and the same four in a batch of six; only random routers see their place."""
    model = build_vit(router)
    batch = noise_batch(6, valid=4)
    batch = batch._replace(
        label=model(normalize(batch.image), batch.valid).logits.argmax(-1)
    )  # all are right
    cut = Batch(*(tensor[:4] for tensor in batch[:-1]))
    whole, apart = looked(model, [batch]), looked(model, [cut])
    assert whole.images == 4
    assert whole.acc == 1
    assert figures(whole) == pytest.approx(figures(apart), abs=1e-5)


@each_router
def test_batches_add_up(build_vit, noise_batch, router):
    model = build_vit(router, "token", images_per_group=2)
    parts = [noise_batch(4, seed=0), noise_batch(4, seed=1)]
    joint = Batch(*(torch.cat(pair) for pair in zip(parts[0][:-1], parts[1][:-1], strict=True)))
    apart, together = looked(model, parts), looked(model, [joint])
    assert together.images == apart.images == 8
    assert together.acc == apart.acc
    for one, other in zip(apart.layers, together.layers, strict=True):
        assert one.contribution == pytest.approx(other.contribution)
        assert one.mutual_information() == pytest.approx(other.mutual_information(), abs=1e-9)
        torch.testing.assert_close(one.tally.mean_by_position(), other.tally.mean_by_position())


def test_damage_is_that_of_one_random_router(build_vit, noise_batch):
    model, batch = build_vit(TokenChoiceConfig()), noise_batch(64)
    found = looked(model, [batch])
    for layer in found.layers:
        point = RoutingOverrides(random_blocks=(layer.block,))
        right = model(normalize(batch.image), routing_overrides=point).logits.argmax(-1) == batch.label
        assert layer.acc_random == float(right.float().mean())


@pytest.mark.parametrize(
    "router", [TokenChoiceConfig(k=2), ExpertChoiceConfig(), SoftConfig()], ids=lambda r: r.kind
)
def test_noise_flips_more_the_louder_it_is(build_vit, noise_batch, router):
    for layer in looked(build_vit(router), [noise_batch(16)], FIRM).layers:
        assert layer.flips is not None
        none, some, many = layer.flips
        assert none == 0 < some < many <= 1


def test_a_mixture_has_nothing_to_flip(build_vit, noise_batch):
    assert looked(build_vit(MixtureConfig()), [noise_batch(4)]).layers[0].flips is None


def test_experts_that_do_nothing_add_nothing(build_vit, noise_batch):
    """|moe(x)| / |x|: 0 with zero outputs. If every expert returns 0.5 in each of D entries, a mixture adds
    just that to each token, and |moe(x)| = 0.5 sqrt(D)."""
    model = build_vit(MixtureConfig())
    for block in model.config.moe_blocks():
        experts = model.blocks[block].mlp.experts
        experts.w_out_EFD.data.zero_()
        experts.b_out_ED.data.zero_()
    assert [layer.contribution for layer in looked(model, [noise_batch(4)]).layers] == [0, 0]
    residual = {}
    last = model.blocks[model.config.moe_blocks()[0]]
    last.mlp.experts.b_out_ED.data.fill_(0.5)
    last.norm2.register_forward_hook(lambda _, given, __: residual.update(x=given[0]))
    found = looked(model, [noise_batch(4)]).layers[0].contribution
    batch = noise_batch(4)
    model(normalize(batch.image))
    width = residual["x"].shape[-1]
    expected = (0.5 * width**0.5 / residual["x"].detach().norm(dim=-1)).mean()
    assert found == pytest.approx(float(expected), rel=1e-5)

"""What is counted about routers, by hand and on routers that are tied to the class; pictures and the page."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from moe import (
    PRESETS,
    ExpertChoiceConfig,
    MixtureConfig,
    MoEConfig,
    RoutingOverrides,
    SoftConfig,
    TokenChoiceConfig,
    ViT,
)
from moe.config import members
from moe.init import init_weights
from moe.overrides import AS_TRAINED
from moe.routers import RouterConfig, TopKConfig
from moe.routers.soft import SoftRouter, mean_cosine
from moe.routers.token_choice import TokenChoiceRouter
from moe.routing import GatherRouting
from orchestrator.data.batch import Batch, concatenated, normalize
from orchestrator.errors import UsageError
from papers.routing_analysis import collect, draw, report
from papers.routing_analysis.collect import Counts, RoutingView
from tests.lanes import mostly_slow
from tests.orchestrator.training.batches import make_batch, with_fields

FOUR_PATCHES = replace(PRESETS["debug"], image_size=8, patch_size=4)
KINDS = [kind() for kind in members(RouterConfig)]
each_router = pytest.mark.parametrize("router", KINDS, ids=lambda router: router.kind)


def build_vit(router: RouterConfig, pooling: str = "gap", **fields) -> ViT:
    """The debug model with 16 patches in evaluation mode; its logits depend on every block."""
    moe = MoEConfig(router=router, **{"num_experts": 4, "layers": "last_2", **fields})
    model = ViT(replace(PRESETS["debug"], moe=moe, pooling=pooling))
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(1))
    return model.eval()


def noise_batch(count: int, valid: int | None = None, seed: int = 0) -> Batch:
    """Images of noise without white pixels; labels 0, 1, 2, 0, .., the last images padding."""
    drawn = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 250, (count, 3, 8, 8), generator=drawn, dtype=torch.uint8)
    return make_batch(images, torch.arange(count) % 3, valid=valid)


def counts_of(model: ViT, batches: list[Batch], classes: int = 10) -> dict[int, Counts]:
    blocks = model.config.moe_blocks()
    return collect.collect(model, batches, blocks=blocks, classes=classes, progress=lambda images: None)


def by_hand() -> GatherRouting:
    """Tokens 0 .. 3, two experts with two slots: token 0 sits at both, token 2 at expert 1; 4 is empty."""
    gates = torch.tensor([[[0.6, 0.4], [0.5, 0.5], [0.1, 0.9], [0.7, 0.3]]])
    return GatherRouting(
        token_GEC=torch.tensor([[[0, 4], [2, 0]]]),
        weight_GEC=torch.tensor([[[0.6, 0.0], [0.92, 0.4]]]),
        gates_GSE=gates,
        load_GE=torch.ones(1, 2),
        aux_G=torch.zeros(1),
        stats={},
    )


def test_seats_and_counts_by_hand():
    """One image of 2x2 patches: patches 1 and 3 are discarded, expert 0 has the largest weight in patch 0."""
    weight_GSE, seat_GSE = collect.seated(by_hand())
    assert seat_GSE.tolist() == [[[True, True], [False, False], [False, True], [False, False]]]
    torch.testing.assert_close(weight_GSE, torch.tensor([[[0.6, 0.4], [0, 0], [0, 0.92], [0, 0]]]))
    view = collect.view_of(by_hand(), FOUR_PATCHES, torch.ones(1))
    assert view.experts_BP().tolist() == [[2, 0, 1, 0]]
    assert view.discarded_BP().tolist() == [[False, True, False, True]]
    assert view.best_BP().tolist() == [[0, -1, 1, -1]]
    counts = Counts(**collect.count(view, torch.tensor([1]), classes=3))
    assert counts.experts.tolist() == [2, 1, 1]  # patches that 0, 1 and 2 experts see
    assert counts.class_expert.tolist() == [[0, 0], pytest.approx([1.9, 2.1]), [0, 0]]
    assert counts.mean_by_class()[1].tolist() == pytest.approx([1.9 / 4, 2.1 / 4])
    assert counts.mean_by_position()[2].tolist() == pytest.approx([0.1, 0.9])
    bins = counts.weights.nonzero().flatten().tolist()
    assert bins == [20, 30, 46]  # fiftieths: 0.4, 0.6, 0.92
    assert counts.mean_weight() == pytest.approx((0.6 + 0.4 + 0.92) / 3)


def test_groups_class_tokens_and_padding():
    """Two groups of two images with a class token and four patches; the third image is padding. Values say
    100 * image + token; token 0 is the class token."""
    value_GS = torch.tensor([[100 * image + token for image in range(2) for token in range(5)]])
    value_GS = torch.cat([value_GS, value_GS + 200])
    found = collect.patches(value_GS, replace(FOUR_PATCHES, pooling="token"), torch.tensor([1.0, 1, 0, 1]))
    assert found.tolist() == [[1, 2, 3, 4], [101, 102, 103, 104], [301, 302, 303, 304]]


@pytest.mark.parametrize("router", [*KINDS, TopKConfig(k=2, capacity_factor="dropless")], ids=repr)
def test_views_of_every_router(router):
    model, batch = build_vit(router, "token", images_per_group=2), noise_batch(6, valid=5)
    routings = model(normalize(batch["image"]), batch.valid, return_routings=True).routings
    view = collect.view_of(routings[0], model.config, batch.valid)
    assert view.gate_BPE.shape == view.seat_BPE.shape == (5, 16, 4)
    open_BP = view.gate_BPE.any(-1)
    assert open_BP.all() or router.kind == "relu"
    torch.testing.assert_close(view.gate_BPE.sum(-1), open_BP.float())
    assert not view.weight_BPE[~view.seat_BPE].any()
    if getattr(router, "capacity_factor", 1) == "dropless":
        assert view.seat_BPE.sum(-1).eq(2).all()
    if not collect.discards(router):
        assert not view.discarded_BP().any()
        torch.testing.assert_close(view.weight_BPE, view.gate_BPE)


def tied_to_the_class(label_B: torch.Tensor, expert_of: list[int]) -> RoutingView:
    """Tokens are their class's unit vector; the router sends class c to expert `expert_of[c]` for sure."""
    classes, experts = len(expert_of), max(expert_of) + 1
    router = TokenChoiceRouter(TokenChoiceConfig(capacity_factor=8.0), dim=classes, num_experts=experts)
    gate = torch.zeros(classes, experts)
    gate[range(classes), expert_of] = 1000.0  # in float32 the softmax is exactly 1 there
    router.gate_DE.data = gate
    x_GSD = torch.eye(classes)[label_B].unsqueeze(1).expand(-1, 4, -1)
    with torch.no_grad():
        routing = router(x_GSD, torch.ones(len(label_B), 4), None, AS_TRAINED)
    return collect.view_of(routing, FOUR_PATCHES, torch.ones(len(label_B)))


@pytest.mark.parametrize(("expert_of", "nats"), [([3, 0, 4, 1, 2], math.log(5)), ([1, 0, 1, 0], math.log(2))])
def test_experts_tied_to_classes(expert_of, nats):
    """Sorted, the map has blocks of ones on the diagonal, whatever the permutation; a router that sees
    another thing than the class shares nothing with it."""
    label_B = torch.arange(20) % len(expert_of)
    counts = Counts(**collect.count(tied_to_the_class(label_B, expert_of), label_B, classes=len(expert_of)))
    rows, columns = draw.block_order(counts.mean_by_class())
    per_expert = len(expert_of) // (max(expert_of) + 1)
    expected = torch.eye(max(expert_of) + 1, dtype=torch.float64).repeat_interleave(per_expert, 0)
    torch.testing.assert_close(counts.mean_by_class()[rows][:, columns], expected)
    assert collect.mutual_information(counts.class_expert) == pytest.approx(nats)
    independent = torch.outer(torch.rand(7).double(), torch.rand(4).double())
    assert collect.mutual_information(independent) == pytest.approx(0, abs=1e-9)


def values(layers: dict[int, Counts]) -> list[float]:
    return [
        x for counts in layers.values() for tensor in vars(counts).values() for x in tensor.flatten().tolist()
    ]


@pytest.mark.parametrize(
    "router", [*KINDS, MixtureConfig(level="image")], ids=lambda r: f"{r.kind}-{getattr(r, 'level', '')}"
)
def test_padding_counts_nowhere_and_batches_add_up(router):
    model = build_vit(router)
    batch = noise_batch(6, valid=4)
    answers = model(normalize(batch["image"]), batch.valid).logits.argmax(-1)
    batch = with_fields(batch, label=answers[:, None])
    whole = counts_of(model, [batch])
    assert {int(counts.images) for counts in whole.values()} == {4}
    assert {int(counts.correct) for counts in whole.values()} == {4}
    alone = counts_of(model, batch.split(4)[:1])
    assert values(whole) == pytest.approx(values(alone), abs=1e-5)

    model = build_vit(router, "token", images_per_group=2)
    parts = [noise_batch(4, seed=seed) for seed in range(2)]
    joint = concatenated(parts)
    apart, together = counts_of(model, parts), counts_of(model, [joint])
    for block, counts in apart.items():
        for name in (
            "class_expert",
            "position_expert",
            "experts",
            "weights",
            "contribution",
            "images",
            "cosines",
        ):
            torch.testing.assert_close(getattr(counts, name), getattr(together[block], name))


def test_accuracy_with_one_random_router():
    model, batch = build_vit(TokenChoiceConfig()), noise_batch(64)
    for block, counts in counts_of(model, [batch]).items():
        point = RoutingOverrides(random_blocks=(block,))
        logits = model(normalize(batch["image"]), routing_overrides=point).logits
        assert counts.correct_random == (logits.argmax(-1) == batch["label"][:, 0]).sum()


@pytest.mark.parametrize(
    "router", [TokenChoiceConfig(k=2), ExpertChoiceConfig(), SoftConfig()], ids=lambda r: r.kind
)
def test_larger_noise_changes_more_choices(router):
    for counts in counts_of(build_vit(router), [noise_batch(16)]).values():
        shares = dict(zip(collect.SIGMAS, (counts.flips / counts.images).tolist(), strict=True))
        assert 0 == shares[0.0] < shares[0.5] < shares[8.0] <= 1
    assert not len(counts_of(build_vit(MixtureConfig()), [noise_batch(4)])[1].flips), "has no noise"


def test_contribution_of_experts_in_closed_form():
    """|moe(x)| / |x|: 0 with zero outputs. If every expert returns 0.5 in each of D entries, a mixture adds
    just that to each token, and |moe(x)| = 0.5 sqrt(D)."""
    model, batch = build_vit(MixtureConfig()), noise_batch(4)
    for block in model.config.moe_blocks():
        experts = model.blocks[block].mlp.experts
        experts.w_out_EFD.data.zero_()
        experts.b_out_ED.data.zero_()
    assert [float(counts.contribution) for counts in counts_of(model, [batch]).values()] == [0, 0]
    first = model.blocks[model.config.moe_blocks()[0]]
    first.mlp.experts.b_out_ED.data.fill_(0.5)
    residual = {}
    first.norm2.register_forward_hook(lambda _, given, __: residual.update(x=given[0]))
    model(normalize(batch["image"]))
    expected = 0.5 * model.config.width**0.5 / residual["x"].detach().norm(dim=-1)
    found = next(iter(counts_of(model, [batch]).values())).contribution
    assert float(found / 4) == pytest.approx(float(expected.mean()), rel=1e-5)
    first.scale2_D = torch.nn.Parameter(torch.full((model.config.width,), 1e-4))
    found = next(iter(counts_of(model, [batch]).values())).contribution
    assert float(found / 4) == pytest.approx(1e-4 * float(expected.mean()), rel=1e-5)


def soft_router(phi_DEC: torch.Tensor) -> SoftRouter:
    D, E, C = phi_DEC.shape
    router = SoftRouter(SoftConfig(slots_per_expert=C, scale_init=10.0), dim=D, num_experts=E)
    init_weights(router, 0)
    router.phi_DEC.data = phi_DEC
    return router


def test_cosines_of_slot_parameters_in_closed_form():
    """Unit vectors as slots: all cosines 0. Both slots of each expert alike: 1 within, 0 between them."""
    orthogonal = collect.parameter_cosines(soft_router(torch.eye(4).view(4, 2, 2)))
    assert orthogonal is not None
    assert collect.extremes(orthogonal).tolist() == [0, 0, 0]
    duplicated = collect.parameter_cosines(soft_router(torch.eye(4)[:, [0, 0, 1, 1]].reshape(4, 2, 2)))
    assert duplicated is not None
    block = torch.ones(2, 2, dtype=torch.float64)
    torch.testing.assert_close(duplicated, torch.block_diag(block, block))
    assert collect.extremes(duplicated).tolist() == pytest.approx([0, 1 / 3, 1])  # 2 of 6 pairs are alike
    assert collect.extremes(collect.cosine(torch.ones(1, 3))).isnan().all(), "a single slot has no pair"
    assert collect.parameter_cosines(TokenChoiceRouter(TokenChoiceConfig(), dim=4, num_experts=2)) is None
    uniform = SoftRouter(SoftConfig(dispatch="uniform", combine="uniform"), dim=4, num_experts=2)
    assert collect.parameter_cosines(uniform) is None


@torch.no_grad()
def test_weights_of_slots():
    """Slots with the same parameters take the same, whatever the tokens. Else the mean cosine is that of the
    training statistic `moe/slot_similarity`, by another way; a group of padding alone changes nothing."""
    valid_GS = torch.tensor([[1.0] * 5, [1.0, 1, 1, 0, 0], [0.0] * 5])
    duplicated = soft_router(torch.randn(4, 1, 1).expand(4, 3, 2).contiguous())
    found = collect.count_slots(duplicated(torch.randn(3, 5, 4), valid_GS, None, AS_TRAINED), valid_GS)
    torch.testing.assert_close(found["slots_NN"] / 2, torch.ones(6, 6, dtype=torch.float64))
    torch.testing.assert_close(found["cosines"] / 2, torch.ones(2, 3, dtype=torch.float64))
    routing = soft_router(torch.randn(4, 3, 2))(torch.randn(3, 5, 4), valid_GS, None, AS_TRAINED)
    found = collect.count_slots(routing, valid_GS)
    assert found["groups"] == 2
    expected = mean_cosine(routing.dispatch_GSEC.flatten(2))[:2].mean()
    assert float(found["cosines"][0, 1] / 2) == pytest.approx(float(expected), abs=1e-6)


def test_white_pixels_by_hand():
    """A 4x4 image of 2x2 patches of 2x2 pixels, patches 1 and 2 discarded."""
    image = torch.arange(16, dtype=torch.uint8).view(1, 1, 4, 4).expand(1, 3, 4, 4)
    white = collect.whitened(image, torch.tensor([[False, True, True, False]]))
    expected = [[0, 1, 255, 255], [4, 5, 255, 255], [255, 255, 10, 11], [255, 255, 14, 15]]
    assert white.dtype == torch.uint8
    assert white[0].tolist() == [expected] * 3


@pytest.mark.parametrize(("pooling", "priority"), [("gap", "none"), ("token", "max")])
def test_white_patches_are_those_without_a_seat(pooling, priority):
    """Seats are looked up token by token in the routing."""
    model, batch = build_vit(TokenChoiceConfig(k=1), pooling, images_per_group=2), noise_batch(6, valid=5)
    setting = RoutingOverrides(capacity_factor=0.4, priority=priority)
    found = collect.discard(model, batch, setting, chosen=range(5))
    output = model(normalize(batch["image"]), batch.valid, routing_overrides=setting, return_routings=True)
    tokens = model.config.tokens()
    for block, routing in zip(model.config.moe_blocks(), output.routings, strict=True):
        seats = [set(routing.token_GEC[group].flatten().tolist()) for group in range(3)]
        dropped_BP = [
            [(b % 2) * tokens + tokens - 16 + p not in seats[b // 2] for p in range(16)] for b in range(5)
        ]
        assert found.patch_BP[block].tolist() == dropped_BP
        assert found.frac[block] == pytest.approx(np.mean(dropped_BP))
        assert 0 < found.frac[block] < 1
        if pooling == "gap":  # else the statistic counts class tokens, too
            assert float(routing.stats["dropped_frac"]) == pytest.approx(found.frac[block])


def test_capacities_that_are_drawn():
    """More room discards less; 16 tokens and 4 experts at capacity 0.01 leave no slot at all."""
    settings, refused = collect.capacity_settings(build_vit(TokenChoiceConfig(k=1)).config, [0.5, 0.01])
    assert [(s.capacity_factor, s.priority) for s in settings] == [(0.5, "none"), (0.5, "max")]
    assert len(refused) == 1
    assert refused[0].startswith("capacity 0.01: ")
    model = build_vit(ExpertChoiceConfig())
    settings, _ = collect.capacity_settings(model.config, [2.0, 0.5, 1.0])
    fractions = [collect.discard(model, noise_batch(4), setting, range(4)).frac[1] for setting in settings]
    assert fractions == sorted(fractions, reverse=True)
    assert [s.capacity_factor for s in settings] == [0.5, 1.0, 2.0]


def test_example_images():
    """The first of every class, then the rest. Maps of slots over patches, and of patches over slots, sum to
    1."""
    assert collect.pick([2, 2, 0, 2, 1, 0], 3) == [0, 2, 4]
    assert collect.pick([2, 2, 0, 2, 1, 0], 4) == [0, 1, 2, 4]
    assert collect.pick([1, 1], 5) == [0, 1]
    model = build_vit(SoftConfig(slots_per_expert=3))
    blocks = model.config.moe_blocks()
    found = collect.examples(model, noise_batch(4, valid=3), count=3, blocks=blocks, settings=[])
    for block in blocks:
        assert found.dispatch_BPEC[block].shape == (3, 16, 4, 3)
        torch.testing.assert_close(found.dispatch_BPEC[block].sum(1), torch.ones(3, 4, 3))
        torch.testing.assert_close(found.combine_BPEC[block].sum((2, 3)), torch.ones(3, 16))


def test_mosaics_by_hand():
    """Four patches with one expert of two slots each: pairs in their places, gaps between. Five experts of
    one slot stand in rows of two, and one place stays empty."""
    gap = np.nan
    found = draw.mosaic(torch.arange(8.0).view(4, 1, 2))
    np.testing.assert_array_equal(found, [[0, 1, gap, 2, 3], [gap] * 5, [4, 5, gap, 6, 7]])
    np.testing.assert_array_equal(draw.mosaic(torch.arange(5.0).view(1, 5, 1)), [[0, 1], [2, 3], [4, gap]])


def test_multiplicity_at_random():
    """16 tokens, 4 experts with 4 slots each: none with (3 / 4) ** 4."""
    found = report.multiplicity_at_random(build_vit(ExpertChoiceConfig()).config)
    assert found[0] == pytest.approx(0.75**4)
    assert sum(found) == pytest.approx(1)
    assert len(found) == 5


@pytest.mark.parametrize(
    "router", mostly_slow(KINDS, fast=[SoftConfig(), TokenChoiceConfig()]), ids=lambda r: r.kind
)
def test_the_page_of_every_router(router):
    """It asks the network for nothing, class names end no markup, and tables have whole rows."""
    model, batch, names = build_vit(router), noise_batch(6, valid=5), ("cat", "<b>dog</b>", "$x$")
    layers = counts_of(model, [batch], classes=3)
    settings = collect.capacity_settings(model.config, [0.5])[0] if collect.discards(router) else []
    drawn = collect.examples(model, batch, count=3, blocks=list(layers), settings=settings)
    parts = list(report.sections(layers, drawn, model.config, names))
    assert all(picture.startswith(b"\x89PNG") for *_, pictures in parts for picture in pictures.values())
    table, rows = report.layer_table(layers), report.figure_table(layers, drawn, names)
    html = report.page("<Routers>", "facts", table, parts)
    assert "&lt;Routers&gt;" in html
    assert "default-src 'none'" in html
    assert not re.search(r"(src|href)=\"(?!data:|#)", html)
    assert any("discards nothing" in text for _, text, _ in parts) != collect.discards(router)
    assert table["block"] == list(layers)
    assert {len(column) for column in table.values()} == {2}
    found = {tuple(cells): value for *cells, value in zip(*rows.values(), strict=True)}
    block, counts = next(iter(layers.items()))
    expected = float(counts.mean_by_class()[1, 2])
    assert found[block, "mean_weight_by_class", "<b>dog</b>", "2"] == expected
    for discarded in drawn.discarded[:1]:
        key = (block, "discarded_frac", "0.5", discarded.setting.priority or "")
        assert found[key] == discarded.frac[block]


def test_outputs_that_are_not_finite_have_no_accuracy():
    model = build_vit(SoftConfig())
    torch.nn.init.constant_(model.norm.weight, float("nan"))
    with pytest.raises(UsageError, match="not finite for 3 of 3 images"):
        counts_of(model, [noise_batch(4, valid=3)])

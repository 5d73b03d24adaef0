"""Dense mixtures: the layer against its definition, the levels, the temperature and how it anneals."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from moe.init import init_weights
from moe.layer import MoEConfig, MoELayer
from moe.routers import MixtureConfig, build_router
from moe.routers.mixture import MixtureRouter, hierarchical

G, S, D, E = 3, 5, 8, 4


def build(config: MixtureConfig) -> MixtureRouter:
    router = build_router(config, dim=D, num_experts=E)
    init_weights(router, seed=0)
    assert isinstance(router, MixtureRouter)
    return router


def some_tokens(seed: int = 0) -> Tensor:
    return torch.randn(G, S, D, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("level", ["token", "image", "hierarchical"])
def test_layer_is_its_definition(level):
    """Every expert works on every token; weights from the token, the mean token, or clusters first."""
    layer = MoELayer(
        MoEConfig(num_experts=E, router=MixtureConfig(level=level, temperature=0.5)), dim=D, hidden=16
    )
    init_weights(layer, seed=0)
    x = some_tokens()
    every = layer.experts(x.reshape(1, G * S, D).expand(E, -1, -1)).unflatten(1, (G, S))
    expected = torch.zeros_like(x)
    for g in range(G):
        for s in range(S):
            decides = x[g].mean(0) if level == "image" else x[g, s]
            score = ((decides @ layer.router.gate_DE) / 0.5).exp().tolist()
            if level == "hierarchical":
                cluster = ((decides @ layer.router.gate_clusters) / 0.5).exp().tolist()
                weight = [
                    cluster[e // 2] / sum(cluster) * score[e] / sum(score[e // 2 * 2 : e // 2 * 2 + 2])
                    for e in range(E)
                ]
            else:
                weight = [value / sum(score) for value in score]
            for e in range(E):
                expected[g, s] = expected[g, s] + weight[e] * every[e, g, s]
    got, routing = layer(x, torch.ones(G))
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(routing.gates_GSE.sum(-1), torch.ones(G, S))
    assert routing.stats["seats_mean"] == routing.stats["seats_max"] == E
    assert routing.stats["dropped_frac"] == 0


@given(clusters=st.sampled_from([1, 2, 3, 6]), seed=st.integers(0, 2**31))
def test_hierarchical_is_the_flat_softmax_if_clusters_are_the_logsumexp_of_theirs(clusters, seed):
    logits = 3 * torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(seed))
    cluster = logits.unflatten(-1, (clusters, -1)).logsumexp(-1)
    torch.testing.assert_close(hierarchical(logits, cluster), logits.softmax(-1))


def test_hierarchical_by_hand():
    """Clusters (0, 1) and (2, 3) weigh 1/4 and 3/4; within them 1/2, 1/2 and 1/3, 2/3."""
    logits = torch.tensor([[[1.0, 1.0, 1.0, 2.0]]]).log()
    cluster = torch.tensor([[[1.0, 3.0]]]).log()
    expected = torch.tensor([[[1 / 8, 1 / 8, 1 / 4, 1 / 2]]])
    torch.testing.assert_close(hierarchical(logits, cluster), expected)


@pytest.mark.parametrize("level", ["token", "image", "hierarchical"])
def test_cold_is_argmax_and_hot_is_uniform(level):
    x, ones = some_tokens(), torch.ones(G, S)
    gates = {
        t: build(MixtureConfig(level=level, temperature=t, temperature_min=1e-9))(x, ones).gates_GSE
        for t in (1e-6, 1.0, 1e6)
    }
    torch.testing.assert_close(gates[1e6], torch.full((G, S, E), 1 / E), atol=1e-4, rtol=0)
    assert gates[1e-6].amax(-1).min() > 0.999
    if level != "hierarchical":  # there the best of the best cluster wins, which may not be the likeliest
        assert torch.equal(gates[1e-6].argmax(-1), gates[1.0].argmax(-1))
    else:
        cluster = gates[1.0].unflatten(-1, (2, 2))
        best = cluster.sum(-1).argmax(-1)
        within = cluster.gather(2, best[..., None, None].expand(-1, -1, 1, 2)).squeeze(2).argmax(-1)
        assert torch.equal(gates[1e-6].argmax(-1), 2 * best + within)


def test_temperature_by_hand():
    config = MixtureConfig(temperature=2.0, temperature_decay=0.5, temperature_min=0.3)
    assert [config.temperature_at(step) for step in (0, 1, 2, 3, 4, 1000)] == [2, 1, 0.5, 0.3, 0.3, 0.3]
    assert MixtureConfig(temperature=0.7).temperature_at(10**6) == 0.7  # no decay


@given(
    start=st.floats(0.2, 10), decay=st.floats(0.5, 1), lowest=st.floats(0.01, 0.2), step=st.integers(0, 500)
)
def test_temperature_is_the_larger_of_bound_and_decay(start, decay, lowest, step):
    config = MixtureConfig(temperature=start, temperature_decay=decay, temperature_min=lowest)
    assert config.temperature_at(step) == pytest.approx(max(lowest, start * decay**step))
    assert config.temperature_at(step + 1) <= config.temperature_at(step)


def test_a_new_router_has_the_temperature_of_step_0():
    router = build(MixtureConfig(temperature=2.0, temperature_decay=0.5))
    assert router.temperature.item() == 2.0
    assert "temperature" not in dict(router.named_parameters())


def test_anneal_moves_the_temperature_and_checkpoints_keep_it():
    config = MixtureConfig(temperature=2.0, temperature_decay=0.5)
    router, x, ones = build(config), some_tokens(), torch.ones(G, S)
    before = router(x, ones).gates_GSE
    router.anneal(3)
    assert router.temperature.item() == 0.25
    after = router(x, ones).gates_GSE
    assert after.amax(-1).mean() > before.amax(-1).mean() + 0.1
    torch.testing.assert_close(after, (before.log() * 2.0 / 0.25).softmax(-1))
    restored = build(config)
    restored.load_state_dict(router.state_dict())
    assert torch.equal(restored(x, ones).gates_GSE, after)


def test_anneal_is_seen_by_a_compiled_router():
    """A buffer, not a number that compilation would freeze."""
    router, x, ones = (
        build(MixtureConfig(temperature=2.0, temperature_decay=0.5)),
        some_tokens(),
        torch.ones(G, S),
    )
    compiled = torch.compile(router, fullgraph=True, backend="eager")
    for step in (0, 2):
        router.anneal(step)
        torch.testing.assert_close(compiled(x, ones).gates_GSE, router(x, ones).gates_GSE)


def test_image_level_weighs_all_tokens_of_an_image_alike_and_ignores_other_images():
    router, x = build(MixtureConfig(level="image")), some_tokens()
    gates = router(x, torch.ones(G, S)).gates_GSE
    assert torch.equal(gates, gates[:, :1].expand(G, S, E))
    assert not torch.allclose(gates[0], gates[1])
    other = torch.cat([x[:1], some_tokens(1)[1:]])
    torch.testing.assert_close(router(other, torch.ones(G, S)).gates_GSE[0], gates[0])


def test_image_level_leaves_padding_out():
    router, x, valid = build(MixtureConfig(level="image")), some_tokens(), torch.ones(G, S)
    valid[0, 2:] = 0
    gates = router(x, valid).gates_GSE
    torch.testing.assert_close(gates[0, :1], router(x[:1, :2], torch.ones(1, 2)).gates_GSE[0, :1])


def test_load_is_the_mass_of_the_valid_tokens():
    router, x, valid = build(MixtureConfig()), some_tokens(), torch.ones(G, S)
    valid[0, 2:] = 0
    routing = router(x, valid)
    torch.testing.assert_close(routing.load_GE[0], routing.gates_GSE[0, :2].sum(0))
    assert routing.load_GE.sum(1).tolist() == pytest.approx([2, S, S])


def test_image_level_with_groups_of_images_weighs_them_together():
    """`level` is of the group: two images in one share their weights."""
    config = MoEConfig(num_experts=E, router=MixtureConfig(level="image"), images_per_group=2)
    layer = MoELayer(config, dim=D, hidden=16)
    init_weights(layer, seed=0)
    gates = layer(torch.cat([some_tokens(), some_tokens(1)]), torch.ones(2 * G))[1].gates_GSE
    assert gates.shape == (G, 2 * S, E)
    assert torch.equal(gates, gates[:, :1].expand_as(gates))


def test_slots_are_the_tokens():
    assert MixtureConfig().slots(num_tokens=17, num_experts=5) == 17


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 0.0}, "temperature must be positive, got 0.0"),
        ({"temperature_min": -0.1}, "temperature_min must be positive, got -0.1"),
        ({"temperature_decay": 0.0}, r"temperature_decay must lie in \(0, 1\], got 0.0"),
        ({"temperature_decay": 1.01}, r"temperature_decay must lie in \(0, 1\], got 1.01"),
        ({"clusters": 0}, "clusters must be at least 1, got 0"),
    ],
)
def test_config_errors(fields, message):
    with pytest.raises(ValueError, match=message):
        MixtureConfig(**fields)


def test_clusters_must_divide_the_experts_where_there_are_clusters():
    with pytest.raises(ValueError, match="clusters=3 does not divide num_experts=4"):
        MixtureConfig(level="hierarchical", clusters=3).slots(num_tokens=5, num_experts=4)
    assert MixtureConfig(clusters=3).slots(num_tokens=5, num_experts=4) == 5


def test_only_hierarchical_has_cluster_weights():
    def names(level: str) -> list[str]:
        module: nn.Module = build(MixtureConfig(level=level))
        return [name for name, _ in module.named_parameters()]

    assert names("token") == names("image") == ["gate_DE"]
    assert names("hierarchical") == ["gate_DE", "gate_clusters"]

"""Dense mixtures: the layer against its definition, the levels, the temperature and its annealing."""

import math

import pytest
import torch

from moe.overrides import RoutingOverrides
from moe.routers import MixtureConfig
from moe.routers.mixture import MixtureRouter
from tests.moe.parts import build_layer, build_router, every_expert, keys, randn

G, S, D, E = 3, 5, 8, 4
X, ONES = randn(G, S, D), torch.ones(G, S)
LEVELS = ["token", "image", "hierarchical"]


def build(**fields) -> MixtureRouter:
    return build_router(MixtureConfig(**fields))


@pytest.mark.parametrize("level", LEVELS)
def test_layer_is_its_definition(level):
    """Every expert processes every token; weights come from the token, the mean token, or clusters first."""
    layer = build_layer(MixtureConfig(level=level, temperature=0.5))
    every, expected = every_expert(layer, X), torch.zeros_like(X)
    for g in range(G):
        for s in range(S):
            decides = X[g].mean(0) if level == "image" else X[g, s]
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
    got, routing = layer(X, torch.ones(G))
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(routing.gates_GSE.sum(-1), torch.ones(G, S))
    assert routing.stats["seats_mean"] == routing.stats["seats_max"] == E
    assert routing.stats["dropped_frac"] == 0


def test_the_articles_other_parts():
    """f(w x) with w = softmax(silu(x A) B / T) and a learned T."""
    config = MixtureConfig(gate="mlp", scale_inputs=True, learn_temperature=True, temperature=2.0)
    layer = build_layer(config)
    router = layer.router
    assert router.log_temperature.exp().item() == pytest.approx(2.0)
    with torch.no_grad():
        router.log_temperature.fill_(0.3)
    score = torch.nn.functional.silu(X @ router.gate_DD) @ router.gate_DE
    weight = (score / math.exp(0.3)).softmax(-1)
    expected = sum(
        weight[..., e : e + 1] * every_expert(layer, X * weight[..., e : e + 1])[e] for e in range(E)
    )
    got, routing = layer(X, torch.ones(G))
    torch.testing.assert_close(got, expected)
    got.square().sum().backward()
    assert router.log_temperature.grad.abs() > 0
    router.before_step(1000)
    torch.testing.assert_close(layer(X, torch.ones(G))[1].gates_GSE, routing.gates_GSE)


def test_clusters_are_weighed_by_one_matrix_whatever_the_gate_of_experts():
    """And by the same temperature, learned or not."""
    router = build(level="hierarchical", gate="mlp", learn_temperature=True)
    torch.nn.init.constant_(router.log_temperature, math.log(0.5))
    pairs = router(X, ONES).gates_GSE.unflatten(-1, (2, 2))
    torch.testing.assert_close(pairs.sum(-1), (X @ router.gate_clusters / 0.5).softmax(-1))
    logits = torch.nn.functional.silu(X @ router.gate_DD) @ router.gate_DE
    within = (logits / 0.5).unflatten(-1, (2, 2)).softmax(-1)
    torch.testing.assert_close(pairs / pairs.sum(-1, keepdim=True), within)


def test_an_image_is_weighed_by_the_mlp_of_its_mean_token():
    router = build(level="image", gate="mlp")
    hidden = torch.nn.functional.silu(X.mean(1, keepdim=True) @ router.gate_DD)
    expected = (hidden @ router.gate_DE).softmax(-1).expand(G, S, E)
    torch.testing.assert_close(router(X, ONES).gates_GSE, expected)


def test_temperature_by_hand():
    config = MixtureConfig(temperature=2.0, temperature_decay=0.5, temperature_min=0.3)
    assert [config.temperature_at(step) for step in (0, 1, 2, 3, 4, 1000)] == [2, 1, 0.5, 0.3, 0.3, 0.3]
    assert MixtureConfig(temperature=0.7).temperature_at(10**6) == 0.7  # no decay


def test_before_step_changes_the_temperature_and_checkpoints_keep_it():
    """A compiled router sees the change too: the temperature is a buffer, not a constant of the graph."""
    router, restored = (build(temperature=2.0, temperature_decay=0.5) for _ in range(2))
    compiled = torch.compile(router, fullgraph=True, backend="eager")
    assert router.temperature.item() == 2.0
    assert "temperature" not in dict(router.named_parameters())
    before = compiled(X, ONES).gates_GSE
    router.before_step(3)
    assert router.temperature.item() == 0.25
    after = router(X, ONES).gates_GSE
    torch.testing.assert_close(after, (before.log() * 2.0 / 0.25).softmax(-1))
    torch.testing.assert_close(compiled(X, ONES).gates_GSE, after)
    restored.load_state_dict(router.state_dict())
    assert torch.equal(restored(X, ONES).gates_GSE, after)


def test_only_hierarchical_has_clusters():
    with pytest.raises(ValueError, match="clusters=3 does not divide num_experts=4"):
        MixtureConfig(level="hierarchical", clusters=3).slots(num_tokens=5, num_experts=4)
    with pytest.raises(ValueError, match="clusters=3 does not divide num_experts=4"):
        build(level="hierarchical", clusters=3)(X, ONES)
    assert MixtureConfig(clusters=3).slots(num_tokens=5, num_experts=4) == 5
    names = {level: list(dict(build(level=level).named_parameters())) for level in LEVELS}
    assert names["token"] == names["image"] == ["gate_DE"]
    assert names["hierarchical"] == ["gate_DE", "gate_clusters"]


def test_padding_is_in_no_mean_and_no_load():
    valid = torch.ones(G, S)
    valid[0, 2:] = 0
    gates = build(level="image")(X, valid).gates_GSE
    torch.testing.assert_close(
        gates[0, :1], build(level="image")(X[:1, :2], torch.ones(1, 2)).gates_GSE[0, :1]
    )
    valid[1] = 0
    assert build(level="image")(X, valid).gates_GSE.isfinite().all(), "a group may be padding alone"
    valid[1] = 1
    routing = build()(X, valid)
    torch.testing.assert_close(routing.load_GE[0], routing.gates_GSE[0, :2].sum(0))
    assert routing.load_GE.sum(1).tolist() == pytest.approx([2, S, S])


def test_a_random_mixture_draws_clusters_and_experts_apart():
    """No difference of two logits in a cluster tells anything about the clusters, nor about another one."""
    gates = build(level="hierarchical")(randn(1, 4000, D), torch.ones(1, 4000), random_GS=keys(1, 4000))
    pairs_SQE = gates.gates_GSE[0].unflatten(-1, (2, 2))
    drawn = [pairs_SQE.sum(-1).log().diff(dim=-1), *pairs_SQE.log().diff(dim=-1).unbind(1)]
    correlation = torch.corrcoef(torch.cat(drawn, 1).T)
    assert (correlation - torch.eye(3)).abs().max() < 5 / math.sqrt(4000)


def test_a_random_mixture_of_images_weighs_all_tokens_alike():
    gates = build(level="image")(X, ONES, random_GS=keys(G, S)).gates_GSE
    assert torch.equal(gates, gates[:, :1].expand(G, S, E))
    assert not torch.equal(gates[0], gates[1])


def test_a_mixture_has_no_choices_to_override():
    with pytest.raises(ValueError, match="a router of kind 'mixture' has no k to override"):
        build()(X, ONES, overrides=RoutingOverrides(k=1))


def test_config_errors():
    message = "temperature=0.05 is below temperature_min=0.1; lower temperature_min too"
    with pytest.raises(ValueError, match=message):
        MixtureConfig(temperature=0.05)
    assert MixtureConfig(temperature=0.1).temperature_at(0) == 0.1
    with pytest.raises(
        ValueError, match=r"temperature_decay=0\.9 and a learned temperature exclude each other"
    ):
        MixtureConfig(temperature_decay=0.9, learn_temperature=True)

"""The MNIST net of Implicit Bias in Soft MoE: its sizes, its one layer by definition, expert subsets."""

import pytest
import torch
import torch.nn.functional as F

from moe.overrides import RoutingOverrides
from moe.patch_net import PatchNet, PatchNetConfig, patches


def images(count: int) -> torch.Tensor:
    return torch.randn(count, 1, 28, 28, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("num_experts", [2, 4, 8, 16, 49])
def test_parameters(num_experts):
    """Section 4.2: as many expert weights whatever the number of experts; a head over all four patches."""
    net = PatchNet(PatchNetConfig(num_experts=num_experts))
    experts = {name: p.numel() for name, p in net.experts.named_parameters()}
    assert experts["w_in_EDF"] + experts["w_out_EFD"] == 2 * 196 * 784 == 307_328
    assert experts["b_in_EF"] == 784
    assert sum(p.numel() for p in net.head.parameters()) == 7_850
    assert {name for name, _ in net.router.named_parameters()} == {"phi_DEC"}  # nothing is normalised
    assert net.router.phi_DEC.shape == (196, num_experts, 1)


def test_patches_in_reading_order():
    x = torch.arange(2 * 2 * 4 * 6).view(2, 2, 4, 6)
    got = patches(x, 2)
    assert got.shape == (2, 6, 8)
    assert torch.equal(got[1, 4], x[1, :, 2:4, 2:4].flatten())


def test_forward_is_the_definition():
    """Slots mix patches, experts are ReLU MLPs, patches mix slots; no skip connection."""
    net, x = PatchNet(PatchNetConfig(num_experts=4)), images(3)
    tokens = torch.stack([x[:, 0, r : r + 14, c : c + 14].flatten(1) for r in (0, 14) for c in (0, 14)], 1)
    logits = tokens @ net.router.phi_DEC[..., 0]
    slots = torch.einsum("bte,btd->bed", logits.softmax(1), tokens)
    w = dict(net.experts.named_parameters())
    answers = [
        F.relu(slots[:, e] @ w["w_in_EDF"][e] + w["b_in_EF"][e]) @ w["w_out_EFD"][e] + w["b_out_ED"][e]
        for e in range(4)
    ]
    mixed = torch.einsum("bte,ebd->btd", logits.softmax(2), torch.stack(answers))
    torch.testing.assert_close(net(x), net.head(mixed.flatten(1)))


def test_expert_subsets():
    net, x = PatchNet(PatchNetConfig()), images(3)
    assert torch.equal(net(x), net(x, RoutingOverrides(experts=8)))
    some = net(x, RoutingOverrides(experts=(1, 5)))
    assert not torch.allclose(net(x), some)
    with torch.no_grad():
        net.experts.w_out_EFD[[0, 2, 3, 4, 6, 7]] = 7.0
    assert torch.equal(some, net(x, RoutingOverrides(experts=(1, 5))))


def test_seeds():
    one, same, other = (PatchNet(PatchNetConfig(), seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one(images(2)), same(images(2)))
    assert not torch.allclose(one(images(2)), other(images(2)))


def test_learns():
    net, labels = PatchNet(PatchNetConfig(num_experts=4)), torch.arange(10)
    optimizer, x = torch.optim.Adam(net.parameters(), lr=1e-3), images(10)
    for _ in range(30):
        loss = F.cross_entropy(net(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in net.parameters())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"num_experts": 5},
            r"num_experts=5 does not divide total_hidden=784; use one of \[1, 2, 4, 7, 8, 14",
        ),
        ({"num_experts": 0}, "num_experts must be at least 1, got 0"),
        ({"patch_size": 10}, "patch_size=10 does not divide image_size=28"),
    ],
)
def test_config_errors(fields, message):
    with pytest.raises(ValueError, match=message):
        PatchNetConfig(**fields)

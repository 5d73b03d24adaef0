"""Hash routing: nothing of it is learned, and its rules are those of the definition."""

import torch

from moe.routers import HashConfig
from moe.routers.hash import by_number, by_signs
from tests.moe.parts import build_router, randn

MASK = (1 << 64) - 1


def split_mix(number: int) -> int:
    """SplitMix64 on integers without a bound."""
    z = (number + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def test_a_number_is_hashed_as_an_unsigned_integer():
    for experts in (3, 8, 12):
        expected = [split_mix(i ^ 7) % experts for i in range(200)]
        assert by_number(torch.arange(200), experts, 7).tolist() == expected


def test_signs_by_hand():
    """Bits 1 and 0 of (1, -1) are 1; of three experts the fourth code is that of the first."""
    x, planes = torch.tensor([[[1.0, -1.0], [-1.0, 1.0]]]), torch.tensor([[1.0, 0.0], [0.0, -1.0]])
    assert by_signs(x, planes, 4).tolist() == [[3, 0]]
    assert by_signs(x, planes, 3).tolist() == [[0, 0]]


def test_the_place_decides_and_what_the_token_holds_does_not():
    router = build_router(HashConfig())
    one, other = (router(randn(2, 16, 8, seed=seed), torch.ones(2, 16)) for seed in (0, 1))
    torch.testing.assert_close(one.gates_GSE, other.gates_GSE)
    assert (one.token_GEC[0] == one.token_GEC[1]).all()
    assert not list(router.parameters())


def test_similar_tokens_have_the_same_expert_by_content():
    router = build_router(HashConfig(by="content"))
    x = randn(1, 64, 8)
    found = router(x, torch.ones(1, 64)).gates_GSE.argmax(-1)
    near = router(x + 1e-4 * randn(1, 64, 8, seed=1), torch.ones(1, 64)).gates_GSE.argmax(-1)
    assert (found == near).float().mean() > 0.95
    assert len(found.unique()) == 4

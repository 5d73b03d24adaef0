"""Attention, pooling and positions against their definitions; the convolutional stem."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from moe import dense
from moe.dense import Attention, AttentionPooling, ConvStem, activate, sincos2d, stem_channels
from tests.moe.parts import images


def test_attention_is_its_definition():
    """softmax(norm(q) norm(k)^T / sqrt(width of a head)) v for every head."""
    attention, x = Attention(12, 3), torch.randn(2, 5, 12)
    torch.nn.init.normal_(attention.norm_q.weight)
    q, k, v = attention.qkv(x).chunk(3, -1)
    heads = []
    for h in range(3):
        part = slice(4 * h, 4 * h + 4)
        q_h = F.layer_norm(q[..., part], (4,), attention.norm_q.weight, eps=1e-6)
        k_h = F.layer_norm(k[..., part], (4,), attention.norm_k.weight, eps=1e-6)
        heads.append((q_h @ k_h.mT / 2).softmax(-1) @ v[..., part])
    torch.testing.assert_close(attention(x), attention.out(torch.cat(heads, -1)))


@pytest.mark.parametrize("qk_norm", [True, False])
def test_attention_pooling_is_its_definition(qk_norm):
    """MHA(probe, tokens), then LayerNorm and MLP around a skip connection."""
    pool, x = AttentionPooling(12, 3, 20, qk_norm=qk_norm), torch.randn(2, 5, 12)
    torch.nn.init.normal_(pool.probe_D)
    q, (k, v) = pool.q(pool.probe_D), pool.kv(x).chunk(2, -1)
    heads = []
    for h in range(3):
        part = slice(4 * h, 4 * h + 4)
        q_h, k_h = (F.layer_norm(t[..., part], (4,), eps=1e-6) if qk_norm else t[..., part] for t in (q, k))
        weights = (k_h @ q_h / 2).softmax(-1)
        heads.append(torch.einsum("bs,bsd->bd", weights, v[..., part]))
    answer = pool.out(torch.cat(heads, -1))
    hidden = F.gelu(pool.mlp.up(F.layer_norm(answer, (12,), eps=1e-6)), approximate="tanh")
    torch.testing.assert_close(pool(x), answer + pool.mlp.down(hidden))


@torch.no_grad()
def test_gelu_by_pieces_is_the_gelu():
    """Also in the last, smaller piece, and far from zero. The input is overwritten only on request."""
    h = torch.randn(3, dense.GELU_PIECE, generator=torch.Generator().manual_seed(0))[:, :-7].contiguous()
    h[0, :5] = torch.tensor([0.0, -1e4, 1e4, -torch.inf, torch.nan])
    before, expected = h.clone(), F.gelu(h.double(), approximate="tanh")
    y = activate(h, "gelu")
    torch.testing.assert_close(y.double(), expected, rtol=2e-6, atol=2e-7, equal_nan=True)
    torch.testing.assert_close(h, before, rtol=0, atol=0, equal_nan=True)
    assert activate(h, "gelu", inplace=True).data_ptr() == h.data_ptr()
    torch.testing.assert_close(h, y, rtol=0, atol=0, equal_nan=True)


def test_pieces_are_for_wide_rows_that_nothing_watches(monkeypatch):
    """Gradients, narrow rows, other precisions and shapes without numbers take torch's own kernel."""
    monkeypatch.setattr(dense, "_gelu_by_pieces_", lambda h: pytest.fail("by pieces"))
    h = torch.randn(2, dense.GELU_WIDTH)
    activate(h, "gelu", inplace=True)
    with torch.no_grad():
        activate(h[0, 1:], "gelu", inplace=True)
        activate(h[:1].expand(3, -1), "gelu", inplace=True)
        activate(h.bfloat16(), "gelu", inplace=True)
        activate(h.to("meta"), "gelu", inplace=True)
        activate(h, "exact_gelu", inplace=True)
        with torch.autocast("cpu", torch.bfloat16):
            activate(h, "gelu", inplace=True)
        with FakeTensorMode() as mode:
            activate(mode.from_tensor(h), "gelu", inplace=True)
        torch.export.export(torch.nn.Sequential(Gelu()), (h,))


class Gelu(torch.nn.Module):
    def forward(self, h):
        return activate(h, "gelu", inplace=True)


def test_sincos2d_by_hand():
    """Two columns and two rows, width 8: frequencies 1 and 1/10,000; column first."""
    sin, cos, tiny = math.sin(1), math.cos(1), 1e-4
    expected = torch.tensor(
        [
            [0, 0, 1, 1, 0, 0, 1, 1],
            [sin, tiny, cos, 1, 0, 0, 1, 1],
            [0, 0, 1, 1, sin, tiny, cos, 1],
            [sin, tiny, cos, 1, sin, tiny, cos, 1],
        ]
    )
    torch.testing.assert_close(sincos2d(2, 8, like=torch.zeros(())), expected, rtol=0, atol=1e-6)


def test_channels_double():
    assert stem_channels(384, 16) == [48, 96, 192, 384]
    assert stem_channels(32, 2) == [32]
    assert stem_channels(8, 32) == [1, 1, 2, 4, 8]


def test_the_stem_does_not_mix_images():
    """Each image has a token per patch."""
    stem, some = ConvStem(16, 4), images(4)
    together = stem(some)
    assert together.shape == (4, 16, 2, 2)
    for i in range(4):
        torch.testing.assert_close(stem(some[i : i + 1])[0], together[i])

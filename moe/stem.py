"""Convolutions that make an image's tokens, where a plain Vision Transformer projects each patch.

Source: Xiao et al. 2021, "Early Convolutions Help Transformers See Better", https://arxiv.org/abs/2106.14881.
The Astroformer of Implicit Bias in Soft MoE (section 4.4.1) has convolutions before its experts, too. Sizes
are ours.
"""

from torch import nn

from moe.init import Draw, constant, zeros


class ConvStem(nn.Sequential):
    """(B, 3, H, W) -> (B, width, H / patch_size, W / patch_size).

    For each factor of two in `patch_size` a 3x3 convolution of stride 2, a norm and GELU; then a projection.
    """

    def __init__(self, width: int, patch_size: int) -> None:
        super().__init__()
        before = 3
        for i, channels in enumerate(stem_channels(width, patch_size)):
            self.add_module(f"conv{i}", nn.Conv2d(before, channels, 3, stride=2, padding=1))
            self.add_module(f"norm{i}", ImageNorm(channels))
            self.add_module(f"gelu{i}", nn.GELU(approximate="tanh"))
            before = channels
        self.project = nn.Conv2d(before, width, 1)


class ImageNorm(nn.GroupNorm):
    """Over all numbers of an image. The paper's is over a batch: images would see each other, and padding."""

    def __init__(self, channels: int) -> None:
        super().__init__(1, channels, eps=1e-6)

    def draws(self) -> dict[str, Draw]:
        return {"weight": constant(1.0), "bias": zeros()}


def stem_channels(width: int, patch_size: int) -> list[int]:
    """Of each convolution, doubled from one to the next up to `width`.

    Raises:
        ValueError: for a patch size that is no power of two from 2.
    """
    halvings = patch_size.bit_length() - 1
    if halvings < 1 or patch_size != 2**halvings:
        raise ValueError(f"stem='conv' needs a patch_size that is a power of two from 2, got {patch_size}")
    return [max(1, width >> left) for left in reversed(range(halvings))]

"""The Astroformer: sizes as printed, its blocks by their definitions, batch norm, refusals."""

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe.batch_norm import BatchNorm
from moe.cost import model_costs, num_expert_params, num_params, param_shapes
from moe.init import init_weights
from moe.layer import MoEConfig
from moe.layout import ParallelConfig
from moe.overrides import RoutingOverrides
from moe.parallel import build_whole
from moe.presets import PRESETS
from moe.routers import SoftConfig
from moe.routing import RoutingInput
from orchestrator.config import RunConfig, TrainConfig
from papers.implicit_bias.astroformer import Astroformer, AstroformerConfig, ConvBlock, RelativeAttention
from tests.moe.parts import randn
from wings.image_text.contrastive import ContrastiveConfig
from wings.image_text.two_towers import TwoTowersConfig

SOFT = MoEConfig(layers="last_2", num_experts=4, router=SoftConfig(), residual=False)
SMALL = AstroformerConfig(
    image_size=16, num_classes=10, stages="CT", widths=(8, 16), depths=(2, 2), stem_width=4, head_dim=8
)


def drawn(module: Any) -> Any:
    """A module in float64 whose weights and buffers are all random."""
    init_weights(module.double(), seed=0)
    for seed, tensor in enumerate([*module.parameters(), *module.buffers()]):
        with torch.no_grad():
            tensor.add_(randn(*tensor.shape, seed=seed).abs() / 3)
    return module


def image(*shape: int, seed: int = 0) -> Tensor:
    return randn(*shape, seed=seed).double()


def test_parameters_are_those_of_astroformer_1() -> None:
    """Millions: of its released code, built at ten classes and 96 pixels; in sum 37.38."""
    config = replace(PRESETS["astroformer-1"], num_classes=10, image_size=96)
    found, starts = dict.fromkeys(("stem", "head", *range(4)), 0), (2, 8, 22, 24)
    for name, shape in param_shapes(config).items():
        part, block = name.split(".")[:2]
        where = next(i for i, end in enumerate(starts) if int(block) < end) if part == "blocks" else part
        found[where if where in found else "head"] += math.prod(shape)
    assert {part: round(count / 1e6, 3) for part, count in found.items()} == {
        "stem": 0.039,
        0: 0.190,
        1: 2.225,
        2: 20.741,
        3: 13.587,
        "head": 0.600,
    }
    assert num_params(config) == 37_381_226
    mlps = (math.prod(shape) for name, shape in param_shapes(config).items() if ".mlp." in name)
    assert sum(mlps) == 9_444_864


@pytest.mark.parametrize("experts", [2, 8, 16, 64, 128])
def test_parameters_with_experts_are_those_printed(experts) -> None:
    """ "180M, 150M": table 6 of Implicit Bias in Soft MoE."""
    config = replace(PRESETS[f"astroformer-1-soft-{experts}e"], num_classes=10, image_size=96)
    assert 179.0e6 < num_params(config) < 179.5e6
    assert 151.0e6 < num_expert_params(config) < 151.3e6
    assert config.moe_blocks() == (22, 23)
    assert config.slots() == 1


def test_multiply_adds_equal_those_of_its_layers() -> None:
    """Hooks on convolutions and linear layers; scores and outputs of attention by their formula."""
    model, found, tokens = SMALL.build(), [], 4
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.register_forward_hook(lambda m, _, out: found.append(m.weight[0].numel() * out.numel()))
    model.eval()(randn(1, 3, 16, 16))
    assert SMALL.tokens() == tokens
    assert sum(model_costs(SMALL).macs.values()) == sum(found) + 2 * 2 * tokens**2 * 16
    with_experts = model_costs(replace(SMALL, moe=SOFT)).macs
    assert with_experts["experts"] == 2 * 4 * 2 * 16 * 64


def test_a_block_of_convolutions_by_its_definition() -> None:
    """Sums over channels and places, written out; in evaluation, where batch norm is a line."""
    block, x = drawn(ConvBlock(4, 8, halves=True)).eval(), image(1, 4, 4, 4)
    weights = dict(block.named_parameters()) | dict(block.named_buffers())

    def norm(name: str, x_CHW: Tensor) -> Tensor:
        w, b, mean, variance = (weights[f"{name}.{n}_C"] for n in ("weight", "bias", "mean", "variance"))
        parts = [(x_HW - mean[c]) / (variance[c] + 1e-5).sqrt() * w[c] + b[c] for c, x_HW in enumerate(x_CHW)]
        return torch.stack(parts)

    def mixed(name: str, x_CHW: Tensor) -> Tensor:
        """A convolution of 1 x 1."""
        kernel = weights[f"{name}.weight"].flatten(1)
        out = torch.stack([sum(k * x_HW for k, x_HW in zip(row, x_CHW, strict=True)) for row in kernel])
        bias = weights.get(f"{name}.bias")
        return out if bias is None else out + bias.view(-1, 1, 1)

    h = F.gelu(norm("norm2", mixed("expand", norm("norm1", x[0]))))
    around, kernel = F.pad(h, (1, 1, 1, 1)), weights["depthwise.weight"]
    h = torch.zeros(32, 2, 2, dtype=torch.float64)
    for c, row, column in product(range(32), range(2), range(2)):
        h[c, row, column] = (
            around[c, 2 * row : 2 * row + 3, 2 * column : 2 * column + 3] * kernel[c, 0]
        ).sum()
    h = F.gelu(norm("norm3", h))
    factor = mixed("excite", F.silu(mixed("squeeze", h.mean((1, 2), keepdim=True)))).sigmoid()
    pooled = torch.stack([x[0, :, r : r + 2, c : c + 2].mean((1, 2)) for r in (0, 2) for c in (0, 2)], 1)
    expected = mixed("project", factor * h) + mixed("shortcut.project", pooled.view(4, 2, 2))
    torch.testing.assert_close(block(x, RoutingInput(torch.ones(1))).x[0], expected)


def test_attention_knows_the_offset_of_two_places() -> None:
    """The bias of a query at one place for a key at another depends on rows and columns between them."""
    grid, heads, width = 3, 2, 4
    attention, x = drawn(RelativeAttention(6, width, heads, grid)), image(1, grid**2, 6)
    q, k, v = attention.qkv(x)[0].view(grid**2, 3, heads, width // heads).unbind(1)
    out = torch.zeros(grid**2, heads, width // heads, dtype=torch.float64)
    for head, i in product(range(heads), range(grid**2)):
        scores = []
        for j in range(grid**2):
            down, right = i // grid - j // grid, i % grid - j % grid
            bias = attention.bias_OH[(down + grid - 1) * (2 * grid - 1) + right + grid - 1, head]
            scores.append(q[i, head] @ k[j, head] / (width // heads) ** 0.5 + bias)
        out[i, head] = torch.stack(scores).softmax(0) @ v[:, head]
    torch.testing.assert_close(attention(x)[0], attention.out(out.flatten(1)))


def test_batch_norm_is_torchs_over_the_valid_images() -> None:
    """Outputs, gradients and running averages; padding is normalised, and changes nothing."""
    ours, theirs = drawn(BatchNorm(3)), nn.BatchNorm2d(3).double()
    with torch.no_grad():
        for a, b in zip(theirs.parameters(), ours.parameters(), strict=True):
            a.copy_(b)
        theirs.running_mean.copy_(ours.mean_C)
        theirs.running_var.copy_(ours.variance_C)
    x, valid, slope = image(6, 3, 4, 5), torch.tensor([1.0, 1, 0, 1, 0, 1]), image(6, 3, 4, 5, seed=1)
    images = [x.clone().requires_grad_(), x[valid > 0].clone().requires_grad_()]
    outputs = ours(images[0], valid), theirs(images[1])
    ours.follow()
    torch.testing.assert_close(outputs[0][valid > 0], outputs[1])
    (outputs[0][valid > 0] * slope[valid > 0]).sum().backward()
    (outputs[1] * slope[valid > 0]).sum().backward()
    torch.testing.assert_close(images[0].grad[valid > 0], images[1].grad)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    torch.testing.assert_close(ours.mean_C, theirs.running_mean)
    torch.testing.assert_close(ours.variance_C, theirs.running_var)
    torch.testing.assert_close(ours.eval()(x, valid), theirs.eval()(x))


def test_gradient_of_batch_norm_with_padding() -> None:
    """Also where padding has a gradient, which moves mean and variance of the others."""
    x, valid = image(4, 2, 2, 2).requires_grad_(), torch.tensor([1.0, 0, 1, 1])
    norm = drawn(BatchNorm(2))
    assert torch.autograd.gradcheck(lambda x, *_: norm(x, valid), (x, norm.weight_C, norm.bias_C))


def averages(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


@pytest.mark.parametrize(
    "options", [ParallelConfig(), ParallelConfig(activation_checkpointing=True)], ids=repr
)
def test_a_step_moves_the_averages_once(options) -> None:
    """Recomputed blocks do not move them again, nor does evaluation, nor training of a frozen norm."""
    expected, model = SMALL.build(), build_whole(SMALL, torch.device("cpu"), seed=0, options=options)
    images = randn(4, 3, 16, 16)
    expected.train()(images)
    model.train()(images).logits.sum().backward()
    assert averages(model).keys() == averages(expected).keys()
    after = averages(model)
    torch.testing.assert_close(after, averages(expected))
    assert (after["stem.norm.mean_C"] != 0).all()
    model.eval()(images)
    model.freeze("stem.", "blocks.")
    model.train()(images)
    torch.testing.assert_close(averages(model), after, rtol=0, atol=0)


def test_bfloat16_computes_statistics_in_float32() -> None:
    model = build_whole(SMALL, torch.device("cpu"), seed=0, compute_dtype=torch.bfloat16)
    exact, images = SMALL.build(), randn(8, 3, 16, 16)
    for training in (True, False):
        found, expected = (each.train(training).features(images) for each in (model, exact))
        torch.testing.assert_close(found.float(), expected, rtol=0, atol=0.05)
    assert all(buffer.dtype == torch.float32 for buffer in model.buffers())


def test_without_the_skip_connection_the_last_block_is_its_experts() -> None:
    model = Astroformer(replace(SMALL, moe=replace(SOFT, layers="last_1"))).eval()
    with torch.no_grad():
        for param in model.blocks[-1].mlp.experts.parameters():
            param.zero_()
    assert model.blocks[-1](randn(2, 16, 2, 2), RoutingInput(torch.ones(2))).x.abs().max() == 0


def test_dropout_is_of_the_heads_input_and_of_training() -> None:
    model, images, keys_B = replace(SMALL, dropout=0.5).build(), randn(2, 3, 16, 16), torch.arange(2)
    inputs = []
    model.head.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    model(images, keys_B=keys_B)
    model(images)
    dropped = inputs[0] == 0
    assert 0.2 < dropped.float().mean() < 0.8
    torch.testing.assert_close(inputs[0][~dropped], 2 * inputs[1][~dropped])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stages": "CVT"}, "stages are letters C and T, such as 'CCCT', got 'CVT'"),
        ({"depths": (2,)}, r"depths has a positive number for each of stages='CT', got \(2,\)"),
        ({"widths": (8, 20)}, r"head_dim=8 does not divide a width of stage T: widths=\(8, 20\)"),
        ({"widths": (6, 16)}, "the 4 of squeeze and excitation does not divide a width of stage C"),
        ({"image_size": 12}, "image_size=12 cannot be halved 3 times.* use a multiple of 8"),
        ({"moe": SOFT, "stages": "CC"}, "experts replace the MLPs of a last stage T, got stages='CC'"),
        ({"moe": replace(SOFT, layers="last_3")}, "layers='last_3' does not fit depth=2: blocks are 0 .. 1"),
    ],
)
def test_refusals(fields, message) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **fields)
    with pytest.raises(ValueError, match="a dense model has no routing"):
        SMALL.build()(randn(1, 3, 16, 16), routing_overrides=RoutingOverrides(experts=1))


def test_batch_norm_refuses_microbatches() -> None:
    """Also of a tower."""
    small = TrainConfig(microbatch=32)
    with pytest.raises(ValueError, match=r"microbatch=32 would change the results of .*'astroformer', which"):
        RunConfig(model=AstroformerConfig(), train=small)
    towers = TwoTowersConfig(image=AstroformerConfig())
    with pytest.raises(ValueError, match=r"microbatch=32 would change the results of .*'two_towers'"):
        RunConfig(model=towers, task=ContrastiveConfig(), train=small)

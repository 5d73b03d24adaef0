"""RandAugment against torchvision's; mixup and CutMix against loops over images and pixels."""

import math
from random import Random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import RandAugment

from orchestrator.data.augment import (
    GREY,
    OPERATIONS,
    cross_entropy,
    dominant_label,
    draw,
    mix,
    partners,
    randaugment,
)
from tests.orchestrator.data.images import RGB

NAMES = [*RandAugment()._AUGMENTATION_SPACE]
SIGNED = {*NAMES[1:10]}
IMAGE = torch.from_numpy(np.array(RGB)).permute(2, 0, 1)[:, :, :48]

SIZE = 12
KEYS = [f"0/3/image-{n}" for n in range(600)]
MIXUP = draw(KEYS, mixup=0.4, cutmix=0, size=SIZE)
CUTMIX = draw(KEYS, mixup=0, cutmix=1.0, size=SIZE)
BOTH = draw(KEYS, mixup=0.4, cutmix=1.0, size=SIZE)


def by_loop(images: Tensor, draws: np.ndarray) -> Tensor:
    mixed = images.clone()
    for i, (weight, top, left, bottom, right) in enumerate(draws.tolist()):
        partner = images[i + 1 if i % 2 == 0 else i - 1]
        if top < bottom and left < right:
            box = (slice(None), slice(int(top), int(bottom)), slice(int(left), int(right)))
            mixed[i][box] = partner[box]
        else:
            mixed[i] = weight * images[i] + (1 - weight) * partner
    return mixed


def boxed(draws: np.ndarray) -> np.ndarray:
    """Returns for each image whether it has a box."""
    return (draws[:, 1] < draws[:, 3]) & (draws[:, 2] < draws[:, 4])


def random_images(count: int) -> Tensor:
    return torch.rand(count, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0)) * 2 - 1


def published(name: str, magnitude: int, sign: int) -> Tensor:
    """Returns the image as torchvision's operation changes it."""
    theirs = RandAugment(interpolation=InterpolationMode.NEAREST, fill=GREY)
    magnitudes, signed = theirs._AUGMENTATION_SPACE[name]
    values = magnitudes(31, *IMAGE.shape[1:])
    value = 0.0 if values is None else float(values[magnitude]) * (sign if signed else 1)
    return theirs._apply_image_or_video_transform(
        IMAGE, name, value, interpolation=theirs.interpolation, fill=theirs._fill
    )


@pytest.mark.parametrize("name", NAMES)
def test_operations_are_torchvisions(name: str) -> None:
    for magnitude in (0, 9, 30):
        for sign in (1, -1):
            found = OPERATIONS[NAMES.index(name)](IMAGE, sign * magnitude / 30)
            assert (found.dtype, found.shape) == (torch.uint8, IMAGE.shape)
            difference = (found.int() - published(name, magnitude, sign).int()).abs()
            # Rounding decides from which side of a border a pixel near it is taken.
            assert (difference > 1).float().mean() < 0.01
    assert torch.equal(OPERATIONS[NAMES.index(name)](IMAGE, 0.5), IMAGE) == (name == "Identity")


def test_operations_and_signs_are_drawn_evenly() -> None:
    rng = Random(0)
    found = [randaugment(IMAGE, 1, 15, rng).numpy().tobytes() for _ in range(1000)]
    possible = {
        OPERATIONS[i](IMAGE, sign * 0.5).numpy().tobytes(): len(NAMES) * (2 if name in SIGNED else 1)
        for i, name in enumerate(NAMES)
        for sign in (1, -1)
    }
    assert {*found} == {*possible}
    for outcome, one_in in possible.items():
        expected = 1000 / one_in
        assert abs(found.count(outcome) - expected) < 5 * expected**0.5


def test_operations_follow_one_another() -> None:
    rng, same = Random(3), Random(3)
    twice = randaugment(randaugment(IMAGE, 1, 9, rng), 1, 9, rng)
    assert torch.equal(randaugment(IMAGE, 2, 9, same), twice)
    assert torch.equal(randaugment(IMAGE, 0, 9, same), IMAGE)
    for n in range(60):
        pixel = randaugment(torch.full((3, 1, 1), 200, dtype=torch.uint8), 3, 30, Random(n))
        assert pixel.shape == (3, 1, 1)


@pytest.mark.parametrize("draws", [MIXUP, CUTMIX, BOTH], ids=["mixup", "cutmix", "both"])
def test_pixels_are_those_of_the_definition(draws: np.ndarray) -> None:
    images = random_images(len(draws))
    found, expected = mix(images, torch.from_numpy(draws)), by_loop(images, draws)
    torch.testing.assert_close(found, expected)
    cut = torch.from_numpy(boxed(draws))
    assert torch.equal(found[cut], expected[cut])
    assert draws.dtype == np.float32
    np.testing.assert_array_equal(draws[::2], draws[1::2])
    assert len({row.tobytes() for row in draws}) > 150


def test_without_mixup_and_cutmix_images_are_unchanged() -> None:
    draws = draw(KEYS[:5], mixup=0, cutmix=0, size=SIZE)  # any number of images
    assert draws.tolist() == [[1, 0, 0, 0, 0]] * 5
    images = random_images(4)
    assert torch.equal(mix(images, torch.from_numpy(draws[:4])), images)
    assert draw([], mixup=1, cutmix=0, size=SIZE).shape == (0, 5)


def test_the_weight_is_the_fraction_of_own_pixels() -> None:
    """White images are mixed with black ones."""
    images = torch.zeros(len(KEYS), 3, SIZE, SIZE)
    images[::2] = 1
    for draws in (MIXUP, CUTMIX, BOTH):
        left = mix(images, torch.from_numpy(draws))[::2].mean((1, 2, 3))
        np.testing.assert_allclose(left.numpy(), draws[::2, 0], atol=1e-5)


def test_boxes_have_the_published_distribution() -> None:
    """Against 20,000 boxes by the formulas of Yun et al. 2019, algorithm A1."""
    rng = np.random.default_rng(0)
    cut = np.sqrt(1 - rng.beta(1, 1, 20_000)) * SIZE
    sides = []
    for _ in range(2):
        centre = rng.integers(SIZE, size=20_000)
        half = cut.astype(int) // 2
        sides.append(np.clip(centre + half, 0, SIZE) - np.clip(centre - half, 0, SIZE))
    expected = 1 - sides[0] * sides[1] / SIZE**2
    found = CUTMIX[::2, 0]
    assert abs(found.mean() - expected.mean()) < 4 * expected.std() / math.sqrt(len(found))
    assert abs(found.std() - expected.std()) < 0.04


def test_weights_have_the_distribution_of_mixup() -> None:
    """With both mixup and CutMix, each is as frequent."""
    weights = MIXUP[::2, 0]
    assert not boxed(MIXUP).any()
    assert abs(weights.mean() - 0.5) < 4 * math.sqrt(0.25 / 1.8 / 300)  # variance 1 / 4 (2 a + 1)
    assert abs(weights.var() - 0.25 / 1.8) < 0.02
    mixup = (BOTH[::2, 0] < 1) & ~boxed(BOTH[::2])
    assert 0.42 < mixup.mean() < 0.58


def test_draws_depend_only_on_the_keys_of_a_pair() -> None:
    """The place in the batch, other images and the order of calls do not matter."""
    elsewhere = draw([*KEYS[100:104], *KEYS[20:24]], mixup=0.4, cutmix=1.0, size=SIZE)
    np.testing.assert_array_equal(elsewhere, np.concatenate([BOTH[100:104], BOTH[20:24]]))
    assert not np.array_equal(draw([KEYS[0], KEYS[2]], mixup=0.4, cutmix=1.0, size=SIZE), BOTH[:2])


def test_the_loss_is_the_cross_entropy_of_soft_labels() -> None:
    logits = torch.randn(8, 5, generator=torch.Generator().manual_seed(0))
    label, weight = torch.tensor([0, 1, 2, 2, 4, 3, 1, 0]), torch.from_numpy(MIXUP[:8, :1])
    soft = weight * F.one_hot(label, 5) + (1 - weight) * F.one_hot(partners(label), 5)
    expected = F.cross_entropy(logits, soft, reduction="sum")
    torch.testing.assert_close(cross_entropy(logits, label, torch.from_numpy(MIXUP[:8])), expected)


def test_accuracy_counts_the_dominant_label() -> None:
    assert partners(torch.arange(6)).tolist() == [1, 0, 3, 2, 5, 4]
    draws = torch.tensor([[0.8], [0.8], [0.3], [0.3], [0.5], [0.5]])
    assert dominant_label(torch.tensor([1, 2, 3, 4, 5, 6]), draws).tolist() == [1, 2, 4, 3, 5, 6]


def test_one_graph_for_every_draw() -> None:
    compiled = torch.compile(mix, fullgraph=True, backend="aot_eager", dynamic=False)
    images = random_images(8)
    compiled(images, torch.from_numpy(MIXUP[:8]))
    with torch.compiler.set_stance("fail_on_recompile"):
        for draws in (MIXUP[8:16], CUTMIX[:8], BOTH[:8]):
            part = torch.from_numpy(draws)
            torch.testing.assert_close(compiled(images, part), mix(images, part))

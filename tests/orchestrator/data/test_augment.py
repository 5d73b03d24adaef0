"""Operations on images against Pillow; mixup and CutMix against loops over images and pixels."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import ClassVar, Literal

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from torch import Tensor

from orchestrator.data.augment import (
    ColorJitterConfig,
    CutMixConfig,
    MixupConfig,
    RandAugmentConfig,
    RandomErasingConfig,
    ThreeAugmentConfig,
)
from orchestrator.data.augment.base import AugmentationConfig, Stage, draw
from orchestrator.data.augment.randaugment import OPERATIONS
from orchestrator.tasks.classification import mix_images, partners
from tests.orchestrator.data.images import RGB

LARGE = RGB.resize((224, 224), Image.Resampling.BILINEAR)

SIZE = 12
KEYS = [f"0/3/image-{n}" for n in range(600)]
MIXES = MixupConfig(alpha=0.4), CutMixConfig()
MIXUP = draw(MIXES[:1], KEYS, SIZE)
CUTMIX = draw(MIXES[1:], KEYS, SIZE)
BOTH = draw(MIXES, KEYS, SIZE)


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


def as_tensor(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def random_images(count: int) -> Tensor:
    return torch.rand(count, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0)) * 2 - 1


LEVELS = (0, 3, 10, 15, 20)
ARGUMENTS = {  # the source's at these levels; pixels are of 224
    "AutoContrast": (0, 0, 0, 0, 0),
    "Equalize": (0, 0, 0, 0, 0),
    "Invert": (0, 0, 0, 0, 0),
    "Rotate": (0, 9, 30, 45, 60),  # degrees
    "Posterize": (1, 1, 4, 6, 8),  # bits; 0 runs as 1
    "Solarize": (0, 76, 0, 128, 0),  # 0, 76, 256, 384, 512 in eight bits
    "Color": (0.1, 0.64, 1.9, 2.8, 3.7),
    "Contrast": (0.1, 0.64, 1.9, 2.8, 3.7),
    "Brightness": (0.1, 0.64, 1.9, 2.8, 3.7),
    "Sharpness": (0.1, 0.64, 1.9, 2.8, 3.7),
    "ShearX": (0, 0.09, 0.3, 0.45, 0.6),
    "ShearY": (0, 0.09, 0.3, 0.45, 0.6),
    "TranslateX": (0, 30, 100, 150, 200),
    "TranslateY": (0, 30, 100, 150, 200),
    "Cutout": (0, 12, 40, 60, 80),  # half a side
    "SolarizeAdd": (0, 33, 110, 165, 220),
}
SIGNED = {"Rotate", "ShearX", "ShearY", "TranslateX", "TranslateY"}
SIGN_OF_SEED = {0: -1, 1: 1}  # Random(0).random() is 0.84, Random(1).random() is 0.13


def published(image: Image.Image, name: str, argument: float, rng: Random) -> np.ndarray:
    """Returns (H, W, 3) as Pillow's operation changes it, or as the source defines those that differ."""
    pixels = np.asarray(image).astype(int)

    def moved(*matrix: float) -> Image.Image:
        return image.transform(image.size, Image.Transform.AFFINE, matrix, fillcolor=(128, 128, 128))

    def cut_out() -> np.ndarray:
        y, x = np.mgrid[: image.height, : image.width]
        y, x = y - rng.randrange(image.height), x - rng.randrange(image.width)
        inside = (-argument <= y) & (y < argument) & (-argument <= x) & (x < argument)
        return np.where(inside[..., None], 128, pixels)

    operations: dict[str, Callable[[], Image.Image | np.ndarray]] = {
        "AutoContrast": lambda: ImageOps.autocontrast(image),
        "Equalize": lambda: ImageOps.equalize(image),
        "Invert": lambda: 255 - pixels,
        "Rotate": lambda: image.rotate(argument, fillcolor=(128, 128, 128)),
        "Posterize": lambda: pixels // 2 ** (8 - argument) * 2 ** (8 - argument),
        "Solarize": lambda: np.where(pixels < argument, pixels, 255 - pixels),
        "Color": lambda: ImageEnhance.Color(image).enhance(argument),
        "Contrast": lambda: np.clip(196 + argument * (pixels - 196.0), 0, 255),
        "Brightness": lambda: np.clip(argument * pixels, 0, 255),
        "Sharpness": lambda: ImageEnhance.Sharpness(image).enhance(argument),
        "ShearX": lambda: moved(1, argument, 0, 0, 1, 0),
        "ShearY": lambda: moved(1, 0, 0, argument, 1, 0),
        "TranslateX": lambda: moved(1, 0, -argument, 0, 1, 0),
        "TranslateY": lambda: moved(1, 0, 0, 0, 1, -argument),
        "Cutout": cut_out,
        "SolarizeAdd": lambda: np.where(pixels < 128, np.clip(pixels + argument, 0, 255), pixels),
    }
    return np.asarray(operations[name]()).astype(int)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_operations_are_the_published(name: str) -> None:
    for level, argument in zip(LEVELS, ARGUMENTS[name], strict=True):
        for seed, sign in SIGN_OF_SEED.items():
            found = OPERATIONS[name](as_tensor(LARGE), level / 10, Random(seed))
            assert (found.dtype, found.shape) == (torch.uint8, (3, 224, 224))
            signed = argument * sign if name in SIGNED else argument
            expected = published(LARGE, name, signed, Random(seed))
            difference = np.abs(found.permute(1, 2, 0).numpy() - expected)
            # A grey that is rounded or cut counts `argument` times.
            allowed = 1 + argument * (name in ("Color", "Sharpness"))
            # Rounding decides from which side of a border a moved pixel is taken.
            assert (difference > allowed).mean() <= (0.04 if name in SIGNED else 0)


@pytest.mark.parametrize("name", [*sorted(SIGNED), "Cutout"])
def test_uncovered_pixels_are_grey(name: str) -> None:
    white = torch.full((3, 32, 32), 255, dtype=torch.uint8)
    assert OPERATIONS[name](white, 1.5, Random(0)).unique().tolist() == [128, 255]


def test_ranges_in_pixels_grow_with_the_image() -> None:
    """At magnitude 10, 100 pixels of 224 are 50 of 112 and 14 of 32; a square of 80 is one of 40 and 10."""
    for side, shift, half in ((112, 50, 20), (32, 14, 5)):
        white = torch.full((3, side, side), 255, dtype=torch.uint8)
        for name in ("TranslateX", "TranslateY"):
            grey = (OPERATIONS[name](white, 1.0, Random(0)) == 128).sum()
            assert int(grey) == 3 * shift * side
        areas = {int((OPERATIONS["Cutout"](white, 1.0, Random(n))[0] == 128).sum()) for n in range(200)}
        assert max(areas) == (2 * half) ** 2
        assert min(areas) >= half**2


def test_operations_and_signs_are_drawn_evenly() -> None:
    """Squares that are cut out differ from draw to draw; they are what remains."""
    rng, image, once = Random(0), as_tensor(RGB), RandAugmentConfig(operations=1, magnitude=15)
    found = [once.apply(image, rng).numpy().tobytes() for _ in range(1600)]
    possible = {
        OPERATIONS[name](image, 1.5, Random(seed)).numpy().tobytes(): 50 if name in SIGNED else 100
        for name in OPERATIONS
        for seed in SIGN_OF_SEED
        if name != "Cutout"
    }
    assert [*OPERATIONS] == [*ARGUMENTS]
    assert len(possible) == 15 + len(SIGNED)
    counts = {outcome: found.count(outcome) for outcome in possible}
    for outcome, expected in possible.items():
        assert abs(counts[outcome] - expected) < 5 * expected**0.5
    assert abs(1600 - sum(counts.values()) - 100) < 5 * 100**0.5


def test_operations_follow_one_another() -> None:
    rng, same, image = Random(3), Random(3), as_tensor(RGB)
    once, both = (RandAugmentConfig(operations=count, magnitude=9) for count in (1, 2))
    assert torch.equal(both.apply(image, same), once.apply(once.apply(image, rng), rng))
    assert torch.equal(image, as_tensor(RGB))
    for n in range(60):
        strong = RandAugmentConfig(operations=3, magnitude=30)
        pixel = strong.apply(torch.full((3, 1, 1), 200, dtype=torch.uint8), Random(n))
        assert pixel.shape == (3, 1, 1)


def test_three_augment_is_one_of_three_as_in_deit() -> None:
    """Grey, solarized or blurred; Pillow's blur is an approximation by boxes."""
    image, counts = as_tensor(LARGE), Counter[str]()
    grey, solarized = LARGE.convert("L").convert("RGB"), ImageOps.solarize(LARGE, 128)
    for n in range(60):
        found, rng = ThreeAugmentConfig().apply(image, Random(n)), Random(n)
        rng.randrange(3)
        blurred = LARGE.filter(ImageFilter.GaussianBlur(rng.uniform(0.1, 2)))
        expected = {"grey": (grey, 1), "solarized": (solarized, 0), "blurred": (blurred, 6)}
        off = {
            name: (found.int() - as_tensor(other).int()).abs().max() for name, (other, _) in expected.items()
        }
        (name,) = (name for name, (_, most) in expected.items() if off[name] <= most)
        counts[name] += 1
    assert min(counts.values()) > 10


def test_blur_shrinks_with_the_image() -> None:
    """At 8 pixels, a blur of at most 0.07 pixels changes nothing, and images of any size can be blurred."""
    blur = next(n for n in range(20) if Random(n).randrange(3) == 2)
    small = torch.randint(0, 256, (3, 8, 8), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    assert torch.equal(ThreeAugmentConfig().apply(small, Random(blur)), small)
    for side in (1, 2, 31):
        black = torch.zeros(3, side, side, dtype=torch.uint8)
        assert ThreeAugmentConfig().apply(black, Random(blur)).shape[1] == side


def test_jitter_changes_three_things_in_any_order() -> None:
    image, found = as_tensor(RGB), set()
    adjust = {"b": ImageEnhance.Brightness, "c": ImageEnhance.Contrast, "s": ImageEnhance.Color}
    for n in range(40):
        rng = Random(n)
        order = rng.sample("bcs", 3)
        expected = RGB
        for name in order:
            expected = adjust[name](expected).enhance(rng.uniform(0.7, 1.3))
        off = (ColorJitterConfig().apply(image, Random(n)).int() - as_tensor(expected).int()).abs()
        assert off.max() <= 4, (n, order)
        found.add("".join(order))
    assert len(found) == 6


def test_erasing_makes_noise_of_a_rectangle() -> None:
    image, always = torch.full((3, 40, 60), 100, dtype=torch.uint8), RandomErasingConfig(fraction=1.0)
    for n in range(100):
        changed = (always.apply(image, Random(n)) != image).any(0)
        rows, columns = changed.any(1).nonzero(), changed.any(0).nonzero()
        h, w = (int(found.max() - found.min() + 1) for found in (rows, columns))
        assert 0.97 * h * w <= changed.sum() <= h * w, "inside, 1 of 256^3 pixels stays"
        assert 0.01 < h * w / 2400 < 0.36
        assert 0.25 < h / w < 4
    noise = always.apply(torch.zeros(3, 200, 200, dtype=torch.uint8), Random(0))
    assert abs(noise[noise > 0].float().mean() - 128) < 3
    assert torch.equal(image, torch.full_like(image, 100))


@pytest.mark.parametrize("draws", [MIXUP, CUTMIX, BOTH], ids=["mixup", "cutmix", "both"])
def test_pixels_are_those_of_the_definition(draws: np.ndarray) -> None:
    images = random_images(len(draws))
    found, expected = mix_images(images, torch.from_numpy(draws)), by_loop(images, draws)
    torch.testing.assert_close(found, expected)
    cut = torch.from_numpy(boxed(draws))
    assert torch.equal(found[cut], expected[cut])
    assert draws.dtype == np.float32
    np.testing.assert_array_equal(draws[::2], draws[1::2])
    assert len({row.tobytes() for row in draws}) > 150


def test_without_mixup_and_cutmix_images_are_unchanged() -> None:
    draws = draw((), KEYS[:5], SIZE)  # any number of images
    assert draws.tolist() == [[1, 0, 0, 0, 0]] * 5
    images = random_images(4)
    assert torch.equal(mix_images(images, torch.from_numpy(draws[:4])), images)
    assert draw(MIXES, [], SIZE).shape == (0, 5)


def test_the_weight_is_the_fraction_of_own_pixels() -> None:
    """White images are mixed with black ones."""
    images = torch.zeros(len(KEYS), 3, SIZE, SIZE)
    images[::2] = 1
    for draws in (MIXUP, CUTMIX, BOTH):
        left = mix_images(images, torch.from_numpy(draws))[::2].mean((1, 2, 3))
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
    elsewhere = draw(MIXES, [*KEYS[100:104], *KEYS[20:24]], SIZE)
    np.testing.assert_array_equal(elsewhere, np.concatenate([BOTH[100:104], BOTH[20:24]]))
    assert not np.array_equal(draw(MIXES, [KEYS[0], KEYS[2]], SIZE), BOTH[:2])


def test_partners_are_neighbours() -> None:
    assert partners(torch.arange(6)).tolist() == [1, 0, 3, 2, 5, 4]


def test_one_graph_for_every_draw() -> None:
    compiled = torch.compile(mix_images, fullgraph=True, backend="aot_eager", dynamic=False)
    images = random_images(8)
    compiled(images, torch.from_numpy(MIXUP[:8]))
    with torch.compiler.set_stance("fail_on_recompile"):
        for draws in (MIXUP[8:16], CUTMIX[:8], BOTH[:8]):
            part = torch.from_numpy(draws)
            torch.testing.assert_close(compiled(images, part), mix_images(images, part))


@pytest.mark.parametrize(("acts", "needs"), [("crop", "box"), ("pixels", "apply"), ("batch", "mix")])
def test_a_member_that_would_change_nothing_is_refused(
    acts: Stage, needs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AugmentationConfig, "kinds", {})

    @dataclass(frozen=True, kw_only=True)
    class Idle(AugmentationConfig):
        kind: Literal["idle"] = "idle"
        stage: ClassVar = acts

    with pytest.raises(ValueError, match=f"Idle: a member of the stage {acts} needs a method {needs}"):
        Idle()

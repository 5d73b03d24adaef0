"""Names of classes, retrieval ranks by a loop, and baselines."""

from math import comb
from pathlib import Path

import pytest
import torch

from orchestrator.data.batch import Batch
from orchestrator.data.fields import BytesField
from orchestrator.errors import UsageError
from tests.wings.image_text.test_contrastive import towers
from wings.image_text.evaluation import (
    CAPTIONS,
    ClassNames,
    EmbeddedPairs,
    embed_pairs,
    nearest_pixels,
    read_class_names,
    zero_shot_scores,
)
from wings.image_text.retrieval import chance_recall, image_ranks, recalls, text_ranks
from wings.image_text.retrieval_page import retrieval_page
from wings.image_text.two_towers import ImageText
from wings.image_text.zero_shot import ZeroShot, embed_classes, unit

NAMES = ClassNames(classes=("zero", "one", "two"), templates=("a photo of {}", "{}"))


def batch(captions: list[str], seed: int = 0, bad: int | None = None) -> Batch:
    count, rng = len(captions), torch.Generator().manual_seed(seed)
    field = CAPTIONS["text"]
    assert isinstance(field, BytesField)
    text = torch.stack([torch.from_numpy(field.decode(caption.encode())) for caption in captions])
    valid = torch.ones(count)
    if bad is not None:
        valid[bad] = 0
    return Batch(
        fields={
            "image": torch.randint(256, (count, 3, 8, 8), generator=rng, dtype=torch.uint8),
            "label": torch.arange(count)[:, None] % 3,
            "text": text,
        },
        valid=valid,
        key=torch.arange(count) + 10 * seed,
        sample=torch.arange(count),
    )


def rank_by_loop(scores: list[float], right: list[bool]) -> int:
    best = max(score for score, is_right in zip(scores, right, strict=True) if is_right)
    return 1 + sum(score >= best and not is_right for score, is_right in zip(scores, right, strict=True))


@pytest.mark.parametrize("seed", range(3))
def test_ranks_are_those_of_a_loop(seed: int) -> None:
    """With ties, an image without captions, captions in any order, and captions of equal words."""
    rng = torch.Generator().manual_seed(seed)
    image = torch.randint(-2, 3, (5, 3), generator=rng).double()
    text = torch.randint(-2, 3, (9, 3), generator=rng).double()
    owner = torch.randint(4, (9,), generator=rng)
    words = torch.randint(6, (9,), generator=rng)
    sim = (image @ text.T).tolist()
    own = [{int(w) for w, o in zip(words, owner, strict=True) if o == i} for i in range(5)]
    expected = [rank_by_loop(sim[i], [int(w) in own[i] for w in words]) for i in range(5) if own[i]]
    assert image_ranks(image, text, owner, words).ranks_Q.tolist() == expected
    columns = [[sim[i][t] for i in range(5)] for t in range(9)]
    expected = [rank_by_loop(columns[t], [int(words[t]) in own[i] for i in range(5)]) for t in range(9)]
    assert text_ranks(image, text, owner, words).ranks_Q.tolist() == expected


def test_chance_is_that_of_all_orders() -> None:
    found = chance_recall(torch.tensor([1, 3]), 6, 2)
    assert found == pytest.approx(((1 - comb(5, 2) / comb(6, 2)) + (1 - comb(3, 2) / comb(6, 2))) / 2)
    assert chance_recall(torch.tensor([1]), 3, 10) == 1
    assert recalls(torch.tensor([1, 2, 7, 30])) == {"r1": 0.25, "r5": 0.5, "r10": 0.75, "median_rank": 4}


def test_every_caption_of_every_readable_image_is_embedded() -> None:
    model = towers(None).build().eval()
    batches = [batch(["one\ntwo", "One!", "zero"], bad=2), batch(["three"], seed=1)]
    pairs = embed_pairs(model, batches)
    assert pairs.captions == ["one", "two", "One!", "three"]
    assert pairs.image_T.tolist() == [0, 0, 1, 2]
    assert pairs.words_T.tolist() == [0, 1, 0, 2]  # cleaned words count
    assert pairs.keys == [0, 1, 10]
    with torch.no_grad():
        tokens = model.config.text.tokenizer.encode(["three"], 6)
        expected = unit(model(ImageText(None, tokens)).heads["text"])
    torch.testing.assert_close(pairs.text_TD[3:], expected)
    with pytest.raises(UsageError, match="none of the images"):
        embed_pairs(model, [batch(["one"], bad=0)])


def test_the_classifier_of_names_is_that_of_the_scores() -> None:
    model = towers(None).build().eval()
    images = batch(["a"] * 6, bad=4)
    found = zero_shot_scores(model, [images], NAMES)
    assert list(found) == ["all", *NAMES.templates]
    assert found["all"].images() == 5
    classifier = ZeroShot(model, NAMES.classes, NAMES.templates).eval()
    with torch.no_grad():
        answers = classifier(images["image"].float() / 127.5 - 1, images.valid).logits.argmax(1)
    right = ((answers == images["label"][:, 0]) & (images.valid > 0)).sum() / 5
    assert found["all"].metrics()["acc1"] == pytest.approx(float(right))
    comma = embed_classes(model, ("zero, nought", "one"), ("{}",))
    torch.testing.assert_close(comma, embed_classes(model, ("zero", "one"), ("{}",)))
    with pytest.warns(UserWarning, match="2 of 3 classes have the same tokens as another"):
        embed_classes(model, ("cat", "dog", "one"), ("{}",))


def test_pixels_find_the_picture_that_is_the_same() -> None:
    train, test = batch(["a"] * 6), batch(["a"] * 6)
    assert nearest_pixels([train], [test]) == 1
    shifted = test.map(lambda field: field.roll(1, 0) if field.ndim == 2 else field)
    assert nearest_pixels([train], [shifted]) == 0


def test_the_page_shows_each_caption_once_and_marks_the_right_ones() -> None:
    batches = [batch(["red <b>", "blue", "red <b>"])]
    unit_vectors = torch.eye(3)
    pairs = EmbeddedPairs(
        unit_vectors,
        unit_vectors[[0, 1, 0]],
        torch.tensor([0, 1, 2]),
        torch.tensor([0, 1, 0]),
        ["red <b>", "blue", "red <b>"],
        [0, 1, 2],
    )
    page = retrieval_page("Found", "3 images", pairs, batches)
    assert "<b>" not in page
    assert page.count("<li>") == 3 * 2
    assert page.count("<span class=right>red &lt;b&gt;</span>") == 2
    assert page.count("data:image/png;base64,") == 3 + 2 * 3


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "no file of class names"),
        ("classes = [", "class names of"),
        ('classes = ["a", "b"]', "it has no list of templates"),
        ('classes = ["a"]\ntemplates = ["{}"]\nprompts = []', "it has 'prompts', and takes"),
        ('classes = "a"\ntemplates = ["{}"]', "classes must be a list of texts"),
        ('classes = ["a", ""]\ntemplates = ["{}"]', "classes must be a list of texts"),
        ('classes = ["a", "b", "a"]\ntemplates = ["{}"]', "two classes are called 'a'"),
        ('classes = ["a", "b"]\ntemplates = ["a photo"]', "in the place of a class's name, got 'a photo'"),
        ('classes = ["a", "b"]\ntemplates = []', "there must be a template"),
    ],
)
def test_a_wrong_file_of_names_is_refused(content: str | None, says: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "names.toml").write_text(content)
    with pytest.raises(UsageError, match=says):
        read_class_names(str(tmp_path / "names.toml"))


def test_names_follow_the_labels(captioned: str) -> None:
    digits = tuple("0123456789")
    turned = ClassNames(classes=digits[::-1], templates=("{}",))
    assert turned.for_data(captioned).classes == digits
    words = ClassNames(classes=tuple("abcdefghij"), templates=("{}",))
    assert words.for_data(captioned) == words
    with pytest.raises(UsageError, match=r"3 classes are named, and .* has 10"):
        NAMES.for_data(captioned)

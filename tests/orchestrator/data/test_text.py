"""Captions as a field of samples, their tokenizer, and the report on them."""

import gzip
import json
from dataclasses import replace
from itertools import combinations, product
from statistics import mean

import numpy as np
import pytest

from moe.tokenizers import BPEConfig, WordsConfig
from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.data.batch import concatenated
from orchestrator.data.images import BadImage
from orchestrator.data.manifest import check_shards, open_manifest
from orchestrator.data.stream import in_process, open_stream
from orchestrator.data.text import (
    ABSENT,
    TextField,
    caption_report,
    captions_as_field,
    read_tokenizer,
    save_tokenizer,
    tokenizer_of,
)
from orchestrator.errors import UsageError
from orchestrator.packing.pack import digits, write_shards
from orchestrator.packing.samples import Sample
from tests.orchestrator.data.images import numbered

FIELD = TextField(tokenizer=WordsConfig(vocabulary="cat\na\ndog"), length=3, captions=2)
NONE = [ABSENT] * 3


def test_rows_of_a_sample():
    """A caption is cut before its end, further captions are left out, and absent ones are marked."""
    assert FIELD.decode(b"A cat!").tolist() == [[3, 2, 0], NONE]
    assert FIELD.decode(b"a dog\n\na cat a cat\nthe third").tolist() == [[3, 4, 0], [3, 2, 0]]
    assert FIELD.empty(1).tolist() == [[[0, 0, 0], NONE]]


@pytest.mark.parametrize(
    ("stored", "reason"), [(b"", "no caption"), (b" \n", "no caption"), (b"\xff", "not UTF-8")]
)
def test_a_sample_without_a_caption_is_bad(stored, reason):
    with pytest.raises(BadImage, match=reason):
        FIELD.decode(stored)


def test_line_breaks_inside_a_caption():
    assert captions_as_field(["a\ncat", " ", None, b"a dog\r\n"]) == b"a cat\na dog"


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> str:
    return digits(str(tmp_path_factory.mktemp("storage")), "digits-captions")


def test_every_slot_has_the_captions_of_its_image(packed):
    """At one worker and at two; a caption names the digit of its image."""
    check_shards(packed, open_manifest(packed), verify=True)
    tokenizer = read_tokenizer(packed)
    fields = {"text": TextField(tokenizer=tokenizer, length=7, captions=5)}
    run = override(RunConfig(), {"data.path": packed, "data.batch_size": 64})

    def batches(rank: int, workers: int):
        return in_process(replace(open_stream(run, "train", rank, workers), fields=fields), range(3))

    words = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    ids = [[tokenizer.pieces(name)[0] for name in (words[d], str(d))] for d in range(10)]
    for whole, *halves in zip(batches(0, 1), batches(0, 2), batches(1, 2), strict=True):
        assert whole["text"].shape == (64, 5, 7)
        assert (whole["text"] == concatenated(halves)["text"]).all()
        for captions, label in zip(whole["text"].tolist(), whole["label"][:, 0].tolist(), strict=True):
            assert all(not {*ids[label]}.isdisjoint(caption) for caption in captions)
            assert len({*map(tuple, captions)}) == 5
    val = replace(open_stream(run, "val", 0, 1), fields=fields)
    *_, last = in_process(val, val.steps())
    assert not last.valid.all()
    assert (last["text"][last.valid == 0, 0] == 0).all()


def test_the_tokenizer_is_not_a_part_of_the_data(packed, tmp_path):
    """The same images and captions have the same digest with any tokenizer, or without."""
    samples = [Sample(numbered(n), 0, str(n), fields={"text": b"a cat"}) for n in range(4)]
    splits, digests = {"train": samples[:3], "val": samples[3:]}, []
    for number, tokenizer in enumerate((None, WordsConfig(vocabulary="a\ncat"), BPEConfig())):
        path = str(tmp_path / str(number))
        digests.append(write_shards(path, ["image"], splits, tokenizer=tokenizer).digest())
        if tokenizer:
            assert read_tokenizer(path) == tokenizer
    assert len({*digests}) == 1
    write_shards(str(tmp_path / "1"), ["image"], splits, fresh=True)
    with pytest.raises(UsageError, match=r"1 has no tokenizer: .*pack it .* with `captions`"):
        read_tokenizer(str(tmp_path / "1"))


def test_tokenizers_by_name(tmp_path):
    captions = [b"a cat\na black cat", b"the cat"]
    assert tokenizer_of("words", captions).vocabulary == "cat\na\nblack\nthe"
    assert tokenizer_of("words:4", captions).vocabulary == "cat\na"
    assert tokenizer_of("bpe:516", captions).size() <= 516
    save_tokenizer(str(tmp_path), FIELD.tokenizer)
    assert tokenizer_of(f"{tmp_path}/tokenizer.json", []) == FIELD.tokenizer
    merges = tmp_path / "merges.txt.gz"
    merges.write_bytes(gzip.compress(b"#version\nc a\nca t</w>\n"))
    assert tokenizer_of(str(merges), []) == BPEConfig(vocabulary="c a\nca t</w>")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("word", "'word' is none of words, .*bpe:SIZE, and no file"),
        ("bpe", "'bpe': a BPE needs a size"),
        ("words:many", "'words:many': invalid literal"),
        ("{}/tokenizer.json", "is neither a tokenizer.json nor a list of merges: it has no vocabulary"),
        ("{}/list.txt", "is neither .* line 'cat' is not a merge"),
    ],
)
def test_what_is_no_tokenizer(tmp_path, name, message):
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {}}))
    (tmp_path / "list.txt").write_text("header\ncat")
    with pytest.raises(UsageError, match=message):
        tokenizer_of(name.format(tmp_path), [b"a cat"])


def test_a_damaged_tokenizer(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UsageError, match=r"tokenizer.json is damaged .*: pack the data set again"):
        read_tokenizer(str(tmp_path))


def test_report():
    train = [b"a cat", b"A cat.\na dog", b"a", b"the black dog\na dog\na dog"]
    report = caption_report(FIELD.tokenizer, train, [b"a zebra", b"the dog"], batch=2)
    assert (report.images, report.captions, report.distinct, report.most) == (4, 7, 4, 3)
    assert sorted(report.lengths.tolist()) == [2, 3, 3, 3, 3, 3, 4]
    assert report.cut(3) == 1 / 7
    assert report.unknown == 0.5
    # all pairs of images, and all captions that they may draw
    texts = [["cat"], ["cat", "dog"], ["a"], ["black", "dog", "dog"]]
    expected = mean(mean(len({*drawn}) for drawn in product(*pair)) for pair in combinations(texts, 2))
    # the report draws images independently
    assert report.distinct_in_batch == pytest.approx(expected, abs=0.1)


@pytest.mark.parametrize("batch", [1, 7, 100])
def test_captions_that_differ_fill_a_batch(batch):
    train = [f"caption {n}".encode() for n in range(40)]
    report = caption_report(BPEConfig(), train, [], batch=batch)
    assert report.batch == min(batch, 40)
    np.testing.assert_allclose(report.distinct_in_batch, report.batch)
    same = caption_report(BPEConfig(), [b"a cat"] * 40, [], batch=batch)
    assert same.distinct_in_batch <= 1

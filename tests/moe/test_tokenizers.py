"""Tokenizers: ids by hand, the same vocabulary from the same texts, what a vocabulary may hold."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moe.codec import from_dict, to_dict
from moe.tokenizers import END, FIRST, UNKNOWN, BPEConfig, TokenizerConfig, WordsConfig, canonical

TEXTS = ["A photo of the_number 7.", "the digit seven", "the Digit; 7!", "crème brûlée numbers numb"]
LEARN = "from tests.moe.test_tokenizers import learn; print(repr(learn()))"
EVERY = pytest.mark.parametrize("family", [WordsConfig, BPEConfig], ids=lambda family: family.kind)


def learn() -> list[TokenizerConfig]:
    return [family.learn(TEXTS, 560) for family in (WordsConfig, BPEConfig)]


def test_words_by_hand():
    """The most frequent words first, then by the alphabet."""
    tokenizer = WordsConfig.learn(TEXTS[:3])
    assert tokenizer.vocabulary.split("\n") == ["the", "7", "digit", "a", "number", "of", "photo", "seven"]
    ids = tokenizer.encode(["The digit nine", "", "the the the the the"], 4)
    assert ids.tolist() == [[2, 4, UNKNOWN, END], [END] * 4, [2, 2, 2, END]]
    assert ids.dtype == torch.int32
    assert WordsConfig.learn(TEXTS, 5).vocabulary == "the\n7\ndigit"
    assert tokenizer.encode([], 4).shape == (0, 4)


def test_bpe_by_hand():
    """`ab` is merged at the end of a word, then `c` with it; a byte of every other character is a piece."""
    tokenizer = BPEConfig(vocabulary="a b</w>\nc ab</w>\na b")
    ab_end, cab_end, ab = range(FIRST + 512, FIRST + 515)
    assert tokenizer.size() == FIRST + 515
    assert tokenizer.pieces("cab AB. abc") == [cab_end, ab_end, ab, FIRST + 256 + ord("c") - ord("!")]
    assert len(tokenizer.pieces("é")) == 2
    assert tokenizer.encode(["cab cab"], 2).tolist() == [[cab_end, END]]


def test_a_file_of_merges_has_a_header():
    assert BPEConfig.of_merges("#version: 0.2\na b\nab c</w>\n") == BPEConfig(vocabulary="a b\nab c</w>")


@pytest.mark.smoke
def test_a_vocabulary_is_the_same_in_every_process():
    """Hashes of strings differ between them."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", LEARN],
        env=os.environ | {"PYTHONHASHSEED": "1", "PYTHONPATH": str(root)},
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"{learn()!r}\n"


@EVERY
def test_laws(family):
    tokenizer = family.learn(TEXTS * 3, 560)
    assert 10 < tokenizer.size() <= 560
    assert from_dict(TokenizerConfig, to_dict(tokenizer)) == tokenizer
    ids = {piece for text in TEXTS for piece in tokenizer.pieces(text)}
    assert min(ids) >= FIRST
    assert max(ids) < tokenizer.size()
    assert tokenizer.pieces(TEXTS[0]) == tokenizer.pieces(canonical(TEXTS[0]))
    for length in (1, 3, 40):
        rows = tokenizer.encode(TEXTS, length)
        assert rows.shape == (len(TEXTS), length)
        assert (rows[:, -1] == END).all()


@pytest.mark.parametrize(
    ("family", "vocabulary", "message"),
    [
        (WordsConfig, "Cat", "line 'Cat' is not a word of cleaned text"),
        (WordsConfig, "a b", "line 'a b' is not a word"),
        (WordsConfig, "a\n\nb", "line '' is not a word"),
        (WordsConfig, "a\nb\na", "lists a word twice"),
        (BPEConfig, "a b c", "line 'a b c' is not a merge"),
        (BPEConfig, "ab c\na b", "line 'ab c' is not a merge of two pieces of the lines before it"),
    ],
)
def test_what_is_refused(family, vocabulary, message):
    with pytest.raises(ValueError, match=message):
        family(vocabulary=vocabulary)


def test_bytes_need_room():
    with pytest.raises(ValueError, match="at least 514, which single bytes take; got 100"):
        BPEConfig.learn(TEXTS, 100)

"""Tokenizers: ids by hand, the same vocabulary from the same texts, what a vocabulary may hold."""

import os
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest
import torch

from moe import tokenizers
from moe.codec import from_dict, to_dict
from moe.tokenizers import END, FIRST, UNKNOWN, BPEConfig, TokenizerConfig, WordsConfig, canonical

TEXTS = ["A photo of the_number 7.", "the digit seven", "the Digit; 7!", "crème brûlée numbers numb"]
# The bytes of the first 256 pieces, in CLIP's order.
SHOWN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
BYTES = [*SHOWN, *(byte for byte in range(256) if byte not in SHOWN)]
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


@pytest.mark.parametrize(
    ("letters", "length"),
    [("ab", 1_000_000), ("漢字仮", 200_000), ("😀😁", 200_000)],
    ids=["latin", "chinese", "emoji"],
)
def test_a_word_of_a_million_bytes(letters, length):
    """Learning and encoding take time that is linear in its length; learning took minutes."""
    word = "".join(Random(0).choices(letters, k=length))
    began = time.monotonic()
    tokenizer = BPEConfig.learn([*TEXTS, word], 540)
    ids = tokenizer.pieces(f"{word} seven")
    assert time.monotonic() - began < 60
    assert tokenizer.size() == 540
    assert decoded(tokenizer, ids) == f"{word}seven"


def decoded(tokenizer: BPEConfig, ids: list[int]) -> str:
    """Returns the text without blanks that has these ids."""
    pieces = [
        *tokenizers._byte_pieces(),
        *(line.replace(" ", "") for line in tokenizer.vocabulary.split("\n")),
    ]
    shown = "".join(pieces[number - FIRST] for number in ids).replace(tokenizers.SUFFIX, "")
    byte_of = {piece: number for number, piece in zip(BYTES, pieces, strict=False)}
    return bytes(byte_of[character] for character in shown).decode()


def test_only_long_words_are_learnt_from_in_pieces(monkeypatch):
    """Shorter words teach the same merges as without a bound."""
    longest = tokenizers.LEARNT_LETTERS
    texts = [*TEXTS, "straße übermut 漢字仮名交文 can't stop!!! ---", "xy" * (longest // 2), "xy" * 9]
    learnt = BPEConfig.learn(texts, 600)
    assert BPEConfig.learn([*texts, "xy" * longest], 600) != learnt
    monkeypatch.setattr(tokenizers, "LEARNT_LETTERS", 10_000)
    assert BPEConfig.learn(texts, 600) == learnt


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

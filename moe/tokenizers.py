"""Tokenizers: texts to ids. A tokenizer is a config, so a model that has it in its own needs no further file.

Texts are cleaned as big_vision cleans them (`canonical`), and end with `END`, which stays when a text is cut
and fills the places behind it. A text tower that pools the last token therefore always sees the end.
"""

import json
import string
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Self

import torch
from torch import Tensor

from moe.config import Family

END = 0  # ends a text, and fills the places behind its end
UNKNOWN = 1  # a word that is not in the vocabulary
FIRST = 2  # the id of the first piece
CLIP_MERGES = 48_894  # the lines of CLIP's file that CLIP uses, after its first
SUFFIX = "</w>"  # of pieces that end a word
# CLIP's, but for English endings after an apostrophe, which is removed.
WORDS = r"\p{L}+|\p{N}|[^\s\p{L}\p{N}]+"
# Learning takes time that is quadratic in a word's length, so a longer word is learnt from in pieces.
# SentencePiece skips texts of more than 4,192 bytes, but captions in Chinese have no blanks.
LEARNT_LETTERS = 256

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def canonical(text: str, keep: str = "") -> str:
    """Returns the text in lower case, without ASCII punctuation but for `keep`, and with single spaces. An
    underscore is a space.

    Source: big_vision, `canonicalize_text` in evaluators/proj/image_text/prompt_engineering.py.
    """
    text = text.replace("_", " ")
    parts = text.split(keep) if keep else [text]
    return " ".join(keep.join(part.translate(_NO_PUNCTUATION) for part in parts).lower().split())


def padded(pieces: Sequence[int], length: int, *, end: int = END, fill: int = END) -> list[int]:
    """Returns the first `length` ids of a text: the last id is `end` if the text is cut."""
    kept = [*pieces[: length - 1], end]
    return kept + [fill] * (length - len(kept))


class TokenizerConfig(Family, ABC, default="words"):
    """The base of tokenizers.

    Attributes:
        vocabulary: what it knows, a line each, the most frequent first.
    """

    vocabulary: str

    @classmethod
    @abstractmethod
    def learn(cls, texts: Iterable[str], size: int | None = None) -> Self:
        """Returns the tokenizer that texts teach, of at most `size` ids; the same for the same texts."""

    @abstractmethod
    def size(self) -> int:
        """Returns the number of ids."""

    @abstractmethod
    def pieces(self, text: str) -> list[int]:
        """Returns the ids of a text, whole and without `END`."""

    def check_known(self) -> None:
        """Raises ValueError if it is no tokenizer of any texts."""

    def encode(self, texts: Sequence[str], length: int) -> Tensor:
        """Cleans texts, and returns their ids, (texts, length). Raises ValueError as `check_known`."""
        self.check_known()
        rows = [padded(self.pieces(text), length) for text in texts]
        return torch.tensor(rows, dtype=torch.int32).reshape(len(rows), length)

    def _lines(self) -> list[str]:
        return self.vocabulary.split("\n") if self.vocabulary else []


@dataclass(frozen=True, kw_only=True)
class WordsConfig(TokenizerConfig):
    """Words, of which those that the vocabulary lacks are one id."""

    kind: Literal["words"] = "words"
    vocabulary: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        _numbers(self.vocabulary)

    @classmethod
    def learn(cls, texts: Iterable[str], size: int | None = None) -> Self:
        counts = Counter(word for text in texts for word in canonical(text).split())
        words = sorted(counts, key=lambda word: (-counts[word], word))
        return cls(vocabulary="\n".join(words if size is None else words[: max(0, size - FIRST)]))

    def size(self) -> int:
        return FIRST + len(_numbers(self.vocabulary))

    def check_known(self) -> None:
        if not self.vocabulary:
            raise ValueError(
                "its tokenizer knows no words: weights from elsewhere come without one, and such a model"
                " embeds tokens alone (`wings.image_text.two_towers.ImageText`)"
            )

    def pieces(self, text: str) -> list[int]:
        numbers = _numbers(self.vocabulary)
        return [numbers.get(word, UNKNOWN) for word in canonical(text).split()]


@dataclass(frozen=True, kw_only=True)
class BPEConfig(TokenizerConfig):
    """CLIP's byte pair encoding: words are split into bytes, and pairs are merged in the vocabulary's order.

    An id is CLIP's id of the piece plus 2 if the merges are CLIP's. No word is unknown.

    Source: openai/CLIP, clip/simple_tokenizer.py.
    """

    kind: Literal["bpe"] = "bpe"
    vocabulary: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        known = {*_byte_pieces()}
        for line in self._lines():
            parts = line.split(" ")
            if len(parts) != 2 or not known.issuperset(parts):
                raise ValueError(
                    f"vocabulary line {line!r} is not a merge of two pieces of the lines before it"
                )
            known.add("".join(parts))

    @classmethod
    def of_merges(cls, text: str) -> Self:
        """Returns the tokenizer of a file of merges, as `bpe_simple_vocab_16e6.txt`: a header, and a merge in
        each line.
        """
        return cls(vocabulary="\n".join(text.strip("\n").split("\n")[1 : CLIP_MERGES + 1]))

    @classmethod
    def learn(cls, texts: Iterable[str], size: int | None = None) -> Self:
        import tokenizers

        taken = FIRST + len(_byte_pieces())
        if size is None or size < taken:
            raise ValueError(f"a BPE needs a size of at least {taken}, which single bytes take; got {size}")
        learner = _empty_bpe(WORDS.replace("+", f"{{1,{LEARNT_LETTERS}}}"))
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=size,
            min_frequency=2,
            show_progress=False,
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            end_of_word_suffix=SUFFIX,
        )
        learner.train_from_iterator(map(canonical, texts), trainer)
        merges = _state(learner)["merges"][: size - taken]
        return cls(vocabulary="\n".join(" ".join(pair) for pair in merges))

    def size(self) -> int:
        return FIRST + len(_byte_pieces()) + len(self._lines())

    def pieces(self, text: str) -> list[int]:
        return _bpe(self.vocabulary).encode(canonical(text)).ids


@lru_cache(maxsize=4)
def _numbers(vocabulary: str) -> dict[str, int]:
    """Returns the ids of words. Raises ValueError for a line that no cleaned text has as a word."""
    words = vocabulary.split("\n") if vocabulary else []
    numbers = {word: number for number, word in enumerate(words, start=FIRST)}
    if canonical(vocabulary).split() != words or len(numbers) < len(words):
        wrong = next((word for word in words if canonical(word).split() != [word]), "")
        raise ValueError(
            f"vocabulary line {wrong!r} is not a word of cleaned text"
            if wrong or "" in words
            else "vocabulary lists a word twice"
        )
    return numbers


@lru_cache(maxsize=1)
def _byte_pieces() -> tuple[str, ...]:
    """Returns a visible character for each byte, in CLIP's order, and the same at the end of a word."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = 256 - len(shown)
    characters = [*map(chr, shown), *(chr(0x100 + number) for number in range(hidden))]
    return (*characters, *(f"{character}{SUFFIX}" for character in characters))


@lru_cache(maxsize=4)
def _bpe(vocabulary: str) -> Any:
    import tokenizers

    merges = [tuple(line.split(" ")) for line in vocabulary.split("\n")] if vocabulary else []
    pieces = (*_byte_pieces(), *("".join(pair) for pair in merges))
    numbers = {piece: number for number, piece in enumerate(pieces, start=FIRST)}
    bpe = _empty_bpe()
    bpe.model = tokenizers.models.BPE(vocab=numbers, merges=merges, end_of_word_suffix=SUFFIX)
    return bpe


def _empty_bpe(words: str = WORDS) -> Any:
    import tokenizers

    bpe = tokenizers.Tokenizer(tokenizers.models.BPE(end_of_word_suffix=SUFFIX))
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(words), behavior="removed", invert=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return bpe


def _state(bpe: Any) -> Any:
    """Returns the model of a tokenizer as JSON values."""
    return json.loads(bpe.to_str())["model"]

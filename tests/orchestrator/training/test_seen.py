"""What a run has read: the fingerprint says which samples were where; too many bad ones end it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from orchestrator.data.batch import Batch, DecodeError
from orchestrator.errors import UsageError
from orchestrator.training.metrics import SampleTracker, check_bad, save_bad, shown
from tests.orchestrator.training.batches import make_batch


def batch(samples: list[int], places: list[int], bad: tuple[DecodeError, ...] = ()) -> Batch:
    made = make_batch(torch.zeros(len(samples), 3, 1, 1), torch.zeros(len(samples)))
    return made._replace(sample=torch.tensor(samples), key=torch.tensor(places), bad=bad)


def bad(*rows: int) -> tuple[DecodeError, ...]:
    return tuple(
        DecodeError("s3://x/train/000000.parquet", row, f"key-{row}", "not an image") for row in rows
    )


def fingerprint(*batches: Batch, before: int = 0) -> int:
    seen = SampleTracker(fingerprint=before, bad=[])
    assert list(seen.training(iter(batches))) == list(batches)
    return seen.gather()[0]


def test_parts_in_any_order_make_the_fingerprint_of_the_whole() -> None:
    whole = fingerprint(batch([11, 12, 13, 14], [0, 1, 2, 3]))
    assert fingerprint(batch([13, 14], [2, 3]), batch([11, 12], [0, 1])) == whole
    assert fingerprint(batch([13, 14], [2, 3]), before=fingerprint(batch([11, 12], [0, 1]))) == whole


@pytest.mark.parametrize(
    ("samples", "places"),
    [([11, 12, 14, 13], [0, 1, 2, 3]), ([11, 12, 13, 15], [0, 1, 2, 3]), ([11, 12, 13, 14], [0, 1, 2, 4])],
    ids=["order", "another sample", "another place"],
)
def test_any_change_shows(samples: list[int], places: list[int]) -> None:
    whole, other = fingerprint(batch([11, 12, 13, 14], [0, 1, 2, 3])), fingerprint(batch(samples, places))
    assert shown(other) != shown(whole)
    assert 0 <= shown(other) < 2**48


def test_validation_leaves_no_fingerprint() -> None:
    seen = SampleTracker(bad=[])
    assert len(list(seen.validation(iter([batch([1, 2], [0, 1], bad(7))])))) == 1
    assert seen.gather() == (0, list(bad(7)))


def test_a_bad_image_counts_once() -> None:
    def batches() -> Iterator[Batch]:
        yield batch([1], [0], bad(5, 3))
        yield batch([1], [1], bad(3))

    seen = SampleTracker(bad=[*bad(9), *bad(3)])
    assert len(list(seen.training(batches()))) == 2
    assert seen.gather()[1] == list(bad(3, 5, 9))


@pytest.mark.parametrize(
    ("count", "read", "epoch", "refused"),
    [
        (10, 100, 5000, False),
        (11, 100, 5000, True),
        (3, 10, 200, True),
        (2, 10, 200, False),
        (20, 2000, 50, False),
    ],
)
def test_too_many(count: int, read: int, epoch: int, refused: bool) -> None:
    """One in a hundred of what was read, or of the first thousand or epoch."""
    some = list(bad(*range(count)))
    if not refused:
        return check_bad(some, read=read, epoch=epoch, most=0.01)
    with pytest.raises(
        UsageError, match=rf"^{count} of \d+ images cannot be decoded, .*max_bad_frac=0.01"
    ) as caught:
        check_bad(some, read=read, epoch=epoch, most=0.01)
    assert "s3://x/train/000000.parquet row 2, key-2: not an image" in str(caught.value)


def test_the_list_is_a_table(tmp_path: Path) -> None:
    save_bad(str(tmp_path), [DecodeError("a,b", 1, "k", 'not "an" image')])
    expected = b'shard,row,key,reason\r\n"a,b",1,k,"not ""an"" image"\r\n'
    assert (tmp_path / "bad_images.csv").read_bytes() == expected

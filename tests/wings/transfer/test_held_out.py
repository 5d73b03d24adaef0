"""A piece of train held out: which images, that they are read as before, and that the test set stays out."""

from pathlib import Path

import numpy as np
import pytest

from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.data.manifest import check_shards, open_manifest
from orchestrator.data.stream import in_order, in_process
from orchestrator.errors import UsageError
from wings.transfer.held_out import hold_out


def images(path: str, split: str) -> dict[int, tuple[bytes, int]]:
    """sample id -> pixels and label, of a whole split."""
    run = override(RunConfig(), {"data.path": path, "data.batch_size": 512})
    stream = in_order(run, split)  # pyright: ignore[reportArgumentType]
    found = {}
    for batch in in_process(stream, stream.steps()):
        for i in np.flatnonzero(batch.valid.numpy()):
            found[int(batch.sample[i])] = (batch["image"][i].numpy().tobytes(), int(batch["label"][i, 0]))
    return found


def test_the_pieces_are_the_training_images(digits: str, tmp_path: Path) -> None:
    """Also where packing chose validation images by the same ids; three shards, of which each gives some."""
    piece = hold_out(digits, str(tmp_path), 0.2)
    manifest, whole = open_manifest(piece), open_manifest(digits)
    check_shards(piece, manifest, verify=True)
    assert manifest.rows("val") == round(0.2 * whole.rows("train"))
    assert len(manifest.splits["val"]) == len(whole.splits["train"]) == 3
    train, val = images(piece, "train"), images(piece, "val")
    assert not train.keys() & val.keys()
    assert train | val == images(digits, "train")
    labels = [label for _, label in val.values()]
    assert manifest.val_majority == np.bincount(labels).max()
    assert len({*labels}) == 10


def test_the_same_piece_is_written_once(digits: str, tmp_path: Path) -> None:
    piece = hold_out(digits, str(tmp_path), 0.2)
    index = Path(piece, "val.index")
    before = index.stat().st_mtime_ns
    assert hold_out(digits, str(tmp_path), 0.2) == piece
    assert index.stat().st_mtime_ns == before
    smaller = hold_out(digits, str(tmp_path), 0.1)
    assert smaller != piece
    assert images(smaller, "val").keys() < images(piece, "val").keys()


@pytest.mark.parametrize("fraction", [1e-4, 0.9999])
def test_an_empty_piece_is_refused(digits: str, tmp_path: Path, fraction: float) -> None:
    with pytest.raises(UsageError, match=r"of the 14\d\d training images of .* is \d+ images, and both"):
        hold_out(digits, str(tmp_path), fraction)

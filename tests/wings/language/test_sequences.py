"""Text as sequences: every byte once, no overlap of splits, files that are no text, and reading them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from jobs import pack_shards
from orchestrator.codec import override
from orchestrator.config import DataConfig, RunConfig
from orchestrator.data.manifest import open_manifest
from orchestrator.data.stream import in_order, in_process, open_stream
from orchestrator.errors import UsageError
from orchestrator.packing import open_source
from orchestrator.packing.pack import digits, pack
from orchestrator.packing.samples import Source
from orchestrator.training.fit import check_data, decided_by_data
from tests.orchestrator.data.images import write
from wings.language.decoder import DecoderConfig
from wings.language.next_token import NextTokenConfig
from wings.language.sequences import SEQUENCE, SequenceField, length_of

LETTERS = bytes(range(33, 127)) * 40  # 3,760 bytes


def texts(source: Source, split: str) -> list[bytes]:
    """The sequences in the order of the text."""
    samples = sorted(source.splits[split], key=lambda sample: sample.key)
    return [bytes(sample.fields[SEQUENCE]) for sample in samples]  # pyright: ignore[reportArgumentType]


def folder(tmp_path: Path, **files: bytes) -> str:
    content = {name.replace("__", "/"): text for name, text in files.items()}
    return f"text:{write(tmp_path / 'books', content)}"


def run_on(path: str) -> RunConfig:
    return RunConfig(
        model=DecoderConfig(width=16, depth=1, heads=2, mlp_dim=16),
        task=NextTokenConfig(),
        data=DataConfig(path=path, batch_size=4),
    )


def test_every_byte_is_predicted_once_and_splits_share_none(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(LETTERS)
    source = open_source(f"text:{file}?length=50", val_frac=0.25)
    train, val = (texts(source, split) for split in ("train", "val"))
    assert {len(piece) for piece in (*train, *val)} == {51}
    joined = [parts[0][:1] + b"".join(part[1:] for part in parts) for parts in (train, val)]
    middle = round(0.75 * len(LETTERS))
    assert LETTERS[:middle].startswith(joined[0])
    assert LETTERS[middle:].startswith(joined[1])
    assert sum(map(len, joined)) > len(LETTERS) - 2 * 51
    assert [s.key for s in source.splits["train"]] != sorted(s.key for s in source.splits["train"])


def test_files_follow_each_other_and_folders_are_splits(tmp_path: Path) -> None:
    name = folder(tmp_path, **{"train__b.txt": b"b" * 30, "train__a.md": b"a" * 30, "val__c.txt": b"c" * 40})
    source = open_source(f"{name}?length=10")
    assert b"".join(part[1:] for part in texts(source, "train")) == b"a" * 29 + b"\0" + b"b" * 30
    assert texts(source, "val") == [b"c" * 11] * 3


def test_what_is_no_text_is_left_out(tmp_path: Path) -> None:
    files = {"good.txt": LETTERS, "bytes.txt": b"\xff\xfe", "zero.txt": b"a\0b", "empty.txt": b""}
    source = open_source(folder(tmp_path, **files))
    reasons = {line.rpartition("/")[2] for line in source.skipped}
    assert reasons == {"bytes.txt: is not UTF-8", "zero.txt: has a byte 0", "empty.txt: is empty"}


@pytest.mark.parametrize(
    ("end", "text", "message"),
    [
        ("?length=0", LETTERS, r"only \?length=BYTES is known, of at least 1"),
        ("?size=3", LETTERS, r"only \?length=BYTES"),
        ("", b"short", "4 bytes of text for train, and a sequence has 129"),
        ("", b"\xff", "0 bytes of text for train.*is not UTF-8"),
    ],
)
def test_refuses(tmp_path: Path, end: str, text: bytes, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        open_source(folder(tmp_path, **{"a.txt": text}) + end)


def test_names_of_files_may_say_nothing_of_splits(tmp_path: Path) -> None:
    named = folder(tmp_path, **{"train.txt": LETTERS, "more.txt": LETTERS})
    with pytest.raises(UsageError, match=r"more.txt is neither for training .*`ignore_split_names`"):
        open_source(named)
    source = open_source(f"{named}?length=50", val_frac=0.5, ignore_split_names=True)
    counts = [len(source.splits[split]) for split in ("train", "val")]
    assert counts == [len(LETTERS) // 50] * 2


@pytest.fixture(scope="module")
def topics(tmp_path_factory: pytest.TempPathFactory) -> str:
    return digits(str(tmp_path_factory.mktemp("storage")), "python-topics")


def test_topics_are_packed_and_read(topics: str) -> None:
    manifest = open_manifest(topics)
    assert manifest.fields == {SEQUENCE: "bytes"}
    assert len(manifest.splits["train"]) == 1
    assert length_of(topics) == 129
    source, run = open_source("python-topics"), run_on(topics)
    assert manifest.rows("train") == len(source.splits["train"]) > 1000
    stream = in_order(run, "val")
    batches = list(in_process(stream, stream.steps()))
    assert {*batches[0].fields} == {SEQUENCE, "label"}
    found = torch.cat([batch[SEQUENCE][batch.valid > 0] for batch in batches])
    assert [bytes(row.tolist()) for row in found] == [s.fields[SEQUENCE] for s in source.splits["val"]]
    assert not batches[-1][SEQUENCE][batches[-1].valid == 0].any()


def test_batches_follow_from_the_plan_alone(topics: str) -> None:
    run = run_on(topics)
    whole = [batch[SEQUENCE] for batch in in_process(open_stream(run, "train", 0, 1), range(4))]
    two = override(run, {"scale.workers": 2, "data.lanes": run.lane_count()})
    halves = [[*in_process(open_stream(two, "train", rank, 2), range(4))] for rank in (0, 1)]
    for step, (one, other) in enumerate(zip(*halves, strict=True)):
        assert torch.equal(torch.cat([one[SEQUENCE], other[SEQUENCE]]), whole[step])
    (late,) = in_process(open_stream(run, "train", 0, 1), range(3, 4))
    assert torch.equal(late[SEQUENCE], whole[3])


def test_the_length_is_that_of_the_data(tmp_path: Path) -> None:
    path = str(tmp_path / "packed")
    pack(path, open_source(folder(tmp_path, **{"a.txt": LETTERS}) + "?length=20"))
    run = decided_by_data(run_on(path))
    assert run.model.tokens() == 20
    check_data(run)
    with pytest.raises(UsageError, match=r"a sequence of 21 bytes.*model\.length=20"):
        SequenceField(length=129).decode(b"a" * 21)


def test_models_and_data_that_do_not_fit(topics: str, digits: str) -> None:
    with pytest.raises(
        UsageError, match=r"samples without images, of fields sequence, .*model\.kind, task\.kind"
    ):
        check_data(RunConfig(data=DataConfig(path=topics)))
    with pytest.raises(UsageError, match="no field 'sequence' of bytes, but image, label"):
        decided_by_data(run_on(digits))


def test_the_command_packs_them(call: Callable[..., tuple[str, str]], tmp_path: Path) -> None:
    write(tmp_path / "in", {"a.txt": b"abcdefghij" * 10, "b.txt": b"\xff"})
    source, out = f"text:{tmp_path / 'in'}?length=9", str(tmp_path / "out")
    error, said = call(pack_shards.main, "--source", source, "--out", out)
    assert error == ""
    assert f"skipped {tmp_path / 'in'}/b.txt: is not UTF-8\n" in said
    assert said.endswith(f"{out}: 8 training and 2 validation sequences, 1 classes, 1 skipped\n")
    error, _ = call(pack_shards.main, "--source", source, "--out", str(tmp_path / "in" / "out"))
    assert "lie in each other" in error

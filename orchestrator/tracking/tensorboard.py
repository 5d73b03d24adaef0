"""TensorBoard: event files beside the run, without a server: ``tensorboard --logdir STORAGE``."""

import time
from dataclasses import dataclass
from typing import Literal

from tensorboardX.crc32c import crc32c
from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

from orchestrator import storage
from orchestrator.tracking.base import Follower, TrackerConfig
from orchestrator.tracking.projection import Projection, Scalar, ScalarReader

FOLDER = "tensorboard"  # of event files, below the directory of a run or a sweep


@dataclass(frozen=True, kw_only=True)
class TensorBoardConfig(TrackerConfig):
    """TensorBoard. The step of a value is the number of images seen; of a result, seconds since the epoch."""

    kind: Literal["tensorboard"] = "tensorboard"

    def follow(self, directory: str) -> Follower:
        return EventFiles(directory)


class EventFiles(Follower):
    """Writes the numbers of a run, and of the trials of a sweep, each once.

    Each update that has new numbers writes a new file, because object storages cannot append. What the files
    have is read from them once, so that a run that resumes repeats nothing.
    """

    where = "TensorBoard"

    def __init__(self, directory: str) -> None:
        super().__init__(directory)
        self._written: dict[str, tuple[ScalarReader, dict[str, int]]] = {}  # by directory

    def send(self, shown: Projection) -> None:
        self.part(shown, "event files", self._write, shown)

    def _write(self, shown: Projection) -> None:
        folder = storage.join(shown.directory, FOLDER)
        if shown.directory not in self._written:
            last = dict[str, int]()
            for name in sorted(storage.names(folder)):
                for scalar in read_events(storage.read_bytes(storage.join(folder, name))):
                    # The clock may have been set back between two files.
                    last[scalar.name] = max(scalar.at, last.get(scalar.name, -1))
            self._written[shown.directory] = ScalarReader(shown.directory), last
        reader, last = self._written.pop(shown.directory)  # what was read is read again after an error
        measured = [s for s in shown.measured_scalars() if last.get(s.name, -1) < s.at]
        scalars = reader.new(shown, last) + measured
        if scalars:
            # TensorBoard reads the files of a run in the order of their names.
            file = f"events.out.tfevents.{time.time_ns() // 1000:017d}.moe-frontier"
            self.write_file(shown, f"{FOLDER}/{file}", events(scalars))
        self._written[shown.directory] = reader, last | {s.name: s.at for s in scalars}


def events(scalars: list[Scalar]) -> bytes:
    """Returns an event file: records of a length, its checksum, an event, and its checksum."""
    version = Event(wall_time=scalars[0].time_s, file_version="brain.Event:2")
    found = [version]
    for scalar in scalars:
        value = Summary(value=[Summary.Value(tag=scalar.name, simple_value=scalar.value)])
        found.append(Event(wall_time=scalar.time_s, step=scalar.at, summary=value))
    records = list[bytes]()
    for event in found:
        content = event.SerializeToString()
        length = len(content).to_bytes(8, "little")
        records += [length, _checksum(length), content, _checksum(content)]
    return b"".join(records)


def read_events(content: bytes) -> list[Scalar]:
    """Returns the numbers of an event file, in their order. Values have 32 bits."""
    found, at = list[Scalar](), 0
    while at + 12 <= len(content):
        length = int.from_bytes(content[at : at + 8], "little")
        event = Event.FromString(content[at + 12 : at + 12 + length])
        found += [Scalar(v.tag, v.simple_value, event.step, event.wall_time) for v in event.summary.value]
        at += length + 16
    return found


def _checksum(content: bytes) -> bytes:
    """The masked CRC-32C of TFRecord."""
    crc = crc32c(content)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8 & 0xFFFFFFFF).to_bytes(4, "little")

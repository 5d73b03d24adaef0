"""One part of the images: read, decoded, looked at, and written as one parquet file."""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from moe.overrides import RoutingOverrides
from orchestrator import storage
from orchestrator.data.images import BadImage, Transform, normalize
from orchestrator.errors import UsageError
from orchestrator.evaluation.trained import Trained
from orchestrator.prediction.inputs import Files, Rows
from orchestrator.prediction.plan import file_of

TOP = 5
AHEAD = 1  # batches that are decoded while one is looked at; so many encoded images are in memory
SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("top5_index", pa.list_(pa.int32())),
        ("top5_class", pa.list_(pa.string())),
        ("top5_prob", pa.list_(pa.float32())),
        ("error", pa.string()),
    ]
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Attributes:
    out: folder or URI of the parts.
    batch_size: images of a forward pass; whole routing groups.
    threads: that decode.
    classes: names by index; None: an index is its own name.
    """

    model: Trained
    point: RoutingOverrides
    out: str
    batch_size: int
    threads: int
    classes: Sequence[str] | None


class Done(NamedTuple):
    part: int
    images: int
    errors: int


class Image(NamedTuple):
    """Decoded to (3, size, size) uint8, or the reason why it is not."""

    key: str
    pixels: Tensor | BadImage


class Predictor:
    """A model that does parts, one after the other, on a GPU where there is one."""

    def __init__(self, settings: Settings) -> None:
        """Raises UsageError if the model is damaged."""
        self.settings = settings
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = settings.model.load(self.device)
        run = settings.model.run
        self.transform = Transform(size=run.model.image_size, eval_crop=run.data.eval_crop)

    def do(self, number: int, part: Files | Rows) -> Done:
        """Writes the part's file, a row per image in their order: whole or not at all.

        Raises:
            UsageError: if a shard is not as it was packed, or the model has no such routing.
            OSError: if reading or writing fails.
        """
        rows = [row for batch in self._batches(part) for row in self._rows(batch)]
        table = pa.Table.from_pylist(rows, SCHEMA)
        content = pa.BufferOutputStream()
        pq.write_table(table, content, compression="zstd")
        location = storage.join(self.settings.out, file_of(number))
        storage.write_bytes(location, content.getvalue().to_pybytes())
        return Done(number, len(table), len(table) - table["error"].null_count)

    def _batches(self, part: Files | Rows) -> Iterator[list[Image]]:
        images, waiting = part.images(), deque()
        with ThreadPoolExecutor(self.settings.threads) as pool:
            while chunk := list(islice(images, self.settings.batch_size)):
                waiting.append([pool.submit(self._decoded, *image) for image in chunk])
                if len(waiting) > AHEAD:
                    yield [image.result() for image in waiting.popleft()]
            while waiting:
                yield [image.result() for image in waiting.popleft()]

    def _decoded(self, key: str, encoded: bytes | BadImage) -> Image:
        if isinstance(encoded, BadImage):
            return Image(key, encoded)
        try:
            return Image(key, self.transform(encoded))
        except BadImage as error:
            return Image(key, error)

    @torch.inference_mode()
    def _rows(self, batch: Sequence[Image]) -> Iterator[dict]:
        size = self.transform.size
        images = torch.zeros(len(batch), 3, size, size, dtype=torch.uint8)
        valid = torch.zeros(len(batch))  # what cannot be read takes no room from the others of its group
        for i, image in enumerate(batch):
            if isinstance(image.pixels, Tensor):
                images[i], valid[i] = image.pixels, 1
        try:
            logits = self.model(
                normalize(images.to(self.device)),
                valid.to(self.device),
                routing_overrides=self.settings.point,
            ).logits
        except ValueError as error:
            raise UsageError(str(error)) from None
        best = logits.float().softmax(-1).topk(min(TOP, logits.shape[-1]))
        names = self.settings.classes
        for image, probs, indices in zip(batch, best.values.tolist(), best.indices.tolist(), strict=True):
            if isinstance(image.pixels, Tensor):
                classes = [names[i] if names else str(i) for i in indices]
                answer = {"top5_index": indices, "top5_class": classes, "top5_prob": probs}
            else:
                answer = {"error": str(image.pixels)}
            yield {"key": image.key} | answer

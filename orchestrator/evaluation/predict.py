"""Batch inference: the classes of each of many images, as parquet files, by Ray Data.

The images, in their order, are cut into parts of whole routing groups. Each part is a row of a Ray Data set.
A pool of actors turns it into predictions, which the driver writes as the part's file in a single operation.
The same call later computes only the parts without a file. docs/prediction.md says why not Ray's own
checkpoints, which would also split routing groups where images are done.
"""

import hashlib
import json
import logging
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice, zip_longest
from threading import Semaphore
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import ray
import torch
from ray.exceptions import RayTaskError
from torch import Tensor

from moe.model import Model
from moe.overrides import RoutingOverrides
from moe.parallel import this_rank
from orchestrator import storage
from orchestrator.checkpoint.files import SUFFIX
from orchestrator.checkpoint.manifest import MANIFEST
from orchestrator.checkpoint.models import ModelRef
from orchestrator.data.batch import normalize
from orchestrator.data.images import BadImage, Transform, may_be_image
from orchestrator.data.manifest import has_manifest, open_manifest
from orchestrator.data.preparation import Preparation
from orchestrator.data.shards import DataSet
from orchestrator.errors import UsageError
from orchestrator.evaluation.evaluate import default_device
from orchestrator.packing.listing import files_below
from orchestrator.tasks.base import ClassNames
from orchestrator.tasks.classification import TOP
from orchestrator.threads import CORES, one_thread
from orchestrator.training.resources import most_resources

if TYPE_CHECKING:
    from orchestrator.evaluation.sharded import Sharding

# Says whose predictions a folder holds. Readers of parquet skip names that begin with `_`.
PLAN = "_plan.json"
# Of a plan: may not change.
IDENTITY = (
    "model_sha256",
    "images_sha256",
    "split",
    "routing",
    "group",
    "background",
    "white",
    "features",
    "threshold",
    "names",
    "dtype",
)
PART = re.compile(r"part-(\d{6,})\.parquet")
# Images of a pass are a multiple, so that an image's last bits do not depend on the others (on CPUs): torch's
# products go by 16 rows, its functions of each number by 32 numbers.
ROWS = 32
FEWEST, MOST, PARTS = 64, 4096, 256  # images of a part, and about how many parts there should be
READ_TOGETHER = 256  # images of a shard, whose reading begins at once
READERS = 16  # files that an actor reads at a time, because object storages answer slowly
KINDS = {"index": pa.int32(), "class": pa.string(), "prob": pa.float32(), "features": pa.float32()}


def _schema(*columns: str) -> pa.Schema:
    lists = [(name, pa.list_(KINDS[name.rpartition("_")[2]])) for name in columns]
    return pa.schema([("key", pa.string()), *lists, ("error", pa.string())])


SCHEMA = _schema("top5_index", "top5_class", "top5_prob")
ABOVE = _schema("above_index", "above_class", "above_prob")
FEATURES = _schema("features")
ImagePart = dict[str, Any]  # number; names of files, or a split of shards with its rows from first to stop

NOT_FINITE = "the model's outputs are not finite"

log = logging.getLogger(__name__)


def part_size(count: int, group: int) -> int:
    """The number of images of a part: few, so that a lost part costs little and many actors have work."""
    wanted = min(MOST, max(FEWEST, count // PARTS))
    return max(group, wanted // group * group)


def list_parts(location: str, split: str | None, *, group: int) -> tuple[str, list[ImagePart]]:
    """Returns a digest of the images below `location`, and their parts.

    Args:
        split: of shards; both if None.

    Raises:
        UsageError: if there are no images, or a folder of files is asked for a split.
    """
    if has_manifest(location):
        manifest, names = open_manifest(location), []
        digest = manifest.digest()
        rows = {s: manifest.rows(s) for s in ("train", "val") if split in (None, s)}
    else:
        if split:
            raise UsageError(f"`split` {split}: {location} has no manifest.json and so no splits")
        sizes = files_below(location)
        names = [name for name in sizes if may_be_image(name)]
        others = [name for name in sizes if not may_be_image(name)]
        if not names:
            raise UsageError(
                f"no images below {location}, but {len(others)} other files, such as {others[0]}; shards need"
                " a manifest.json, as jobs/pack_shards.py writes it"
            )
        if others:
            log.info(
                "%d files are left out, because their names are not those of images: %s ..",
                len(others),
                others[0],
            )
        digest = hashlib.sha256(json.dumps([(name, sizes[name]) for name in names]).encode()).hexdigest()
        rows = {"": len(names)}
    size = part_size(sum(rows.values()), group)
    cuts = [(s, at, min(at + size, count)) for s, count in rows.items() for at in range(0, count, size)]
    return digest, [
        {"number": number, "names": names[first:stop], "split": split, "first": first, "stop": stop}
        for number, (split, first, stop) in enumerate(cuts)
    ]


def digest_of(model: str) -> str:
    """The SHA-256 of an exported file, or of a checkpoint's manifest, which has the digests of its files."""
    location = model if model.endswith(SUFFIX) else storage.join(model, MANIFEST)
    with storage.open_to_read(location) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # pyright: ignore[reportArgumentType]


def begin(out: str, plan: Mapping[str, Any], *, fresh: bool) -> tuple[Mapping[str, Any], set[int]]:
    """Returns the plan of `out`, which is `plan` unless an earlier call began there, and the parts done.

    Raises:
        UsageError: if `out` has other predictions, and they are not to be deleted (`fresh`).
    """
    names = storage.names(out)
    done = {int(match[1]) for name in names if (match := PART.fullmatch(name))}
    for name in names:
        if re.fullmatch(rf"{PART.pattern}\..*\.tmp", name):  # left by a killed process
            storage.delete(storage.join(out, name))
    if done and not fresh:
        if PLAN not in names:
            raise UsageError(f"{out} has parquet files and no {PLAN}: choose another `out`, or use `fresh`")
        before = json.loads(storage.read_bytes(storage.join(out, PLAN)))
        for field in IDENTITY:
            if before.get(field) != plan.get(field):
                files = "1 file" if len(done) == 1 else f"{len(done)} files"
                raise UsageError(
                    f"{out} has {files} of predictions by {before['model']} for {before['images']}"
                    f" with another {field} (was {before.get(field)}, now {plan.get(field)}): choose another"
                    " `out`, or use `fresh` to begin again"
                )
        return before, done
    for number in done:
        storage.delete(storage.join(out, file_of(number)))
    storage.write_bytes(storage.join(out, PLAN), json.dumps(plan, indent=1).encode())
    return plan, set()


def file_of(number: int) -> str:
    return f"part-{number:06d}.parquet"


class Predictor:
    """An actor of Ray Data that predicts the images of parts, on a GPU where there is one."""

    def __init__(
        self,
        model: ModelRef,
        point: RoutingOverrides,
        images: str,
        batch_size: int,
        classes: Sequence[str] | None,
        preparation: Preparation | None = None,
        features: bool = False,
        names: ClassNames | None = None,
        shared: Model | None = None,
        threshold: float | None = None,
    ) -> None:
        """Loads the model, unless it is `shared` with other workers. Raises UsageError if it is damaged.

        threshold: the least probability of a class that is named; None: the five best are.
        """
        self.schema = FEATURES if features else SCHEMA if threshold is None else ABOVE
        self.threshold = threshold
        self.point, self.images, self.batch_size, self.classes = point, images, batch_size, classes
        self.preparation = preparation or model.preparation
        self.device = default_device()
        self.shared = shared is not None
        self.task = model.run.task
        loaded = shared or model.load(self.device)
        self.model = loaded if names is None else self.task.by_names(loaded.config, names)(loaded)
        self.transform = Transform.of(model.signature)
        self.cache_bytes = int(model.run.data.cache_gb * 1e9)
        self.decoding = Semaphore(CORES)

    def __call__(self, parts: pa.Table) -> pa.Table:
        """Returns a row for each image of the parts, in their order, with the number of its part.

        Raises:
            UsageError: if a shard is damaged, or the model has no such routing.
            OSError: if reading fails.
        """
        return pa.concat_tables([self.table(part) for part in parts.to_pylist()])

    def table(self, part: ImagePart | None, passes: int = 0) -> pa.Table:
        """As a call, of one part or none, with at least so many forward passes."""
        batches = self._batches(part) if part else ()
        padded = zip_longest(batches, range(passes), fillvalue=())
        # Arrow holds all classes of a part in a fraction of the memory of lists.
        tables = [pa.Table.from_pylist([*self._predict(batch)], self.schema) for batch, _ in padded]
        found = pa.concat_tables([self.schema.empty_table(), *tables])
        number = pa.array([part["number"] if part else 0] * len(found), pa.int64())
        return found.append_column("part", number)

    def _batches(self, part: ImagePart) -> Iterator[list[tuple[str, Tensor | BadImage]]]:
        """Yields batches of images with their keys, (3, size, size) uint8.

        A batch is decoded while the batch before it is predicted.
        """
        places, waiting = self._places(part), deque()
        with ThreadPoolExecutor(READERS) as pool:
            while chunk := list(islice(places, self.batch_size)):
                waiting.append([(key, pool.submit(self._decoded, read)) for key, read in chunk])
                if len(waiting) > 1:
                    yield [(key, image.result()) for key, image in waiting.popleft()]
            while waiting:
                yield [(key, image.result()) for key, image in waiting.popleft()]

    def _places(self, part: ImagePart) -> Iterator[tuple[str, Callable[[], bytes]]]:
        """Yields the key of each image and a function that reads its bytes."""
        for name in part["names"]:
            yield name, partial(storage.read_bytes, storage.join(self.images, name))
        if part["split"]:
            manifest, begin = open_manifest(self.images), 0
            data = DataSet(path=self.images, manifest=manifest, cache_bytes=self.cache_bytes)
            for number, shard in enumerate(manifest.splits[part["split"]]):
                wanted = range(max(part["first"] - begin, 0), min(part["stop"] - begin, shard.rows))
                keys = data.keys(part["split"], number) if wanted else []
                for first in range(wanted.start, wanted.stop, READ_TOGETHER):
                    row = np.arange(first, min(first + READ_TOGETHER, wanted.stop))
                    of = np.full_like(row, number)
                    images, _ = data.images(part["split"], of, data.records(part["split"], of, row))
                    yield from zip(keys[row[0] :], images, strict=False)
                begin += shard.rows

    def _decoded(self, read: Callable[[], bytes]) -> Tensor | BadImage:
        try:
            encoded = read()
            with self.decoding:
                return self.transform(self.preparation.prepare(encoded))
        except BadImage as error:
            return error
        except FileNotFoundError:
            return BadImage("no such file")
        except PermissionError:
            return BadImage("permission denied")

    @torch.no_grad()
    def _predict(self, batch: Sequence[tuple[str, Tensor | BadImage]]) -> Iterator[dict[str, Any]]:
        # Workers that share a model exchange blocks of equal size.
        count = self.batch_size if self.shared else -(-len(batch) // ROWS) * ROWS
        size = self.transform.size
        pixels = torch.zeros(count, 3, size, size, dtype=torch.uint8)
        valid = torch.zeros(count)  # a bad image takes no capacity from its group
        for i, (_, image) in enumerate(batch):
            if isinstance(image, Tensor):
                pixels[i], valid[i] = image, 1
        inputs = normalize(pixels.to(self.device)), valid.to(self.device)
        run: Any = self.model.features if self.schema is FEATURES else self.model
        try:
            with one_thread():  # as Ray starts actors on CPUs: the last bits depend on the number of threads
                found = run(*inputs, routing_overrides=self.point)
                features = isinstance(found, Tensor)
                outputs = found if features else found.logits
                # Of the empty images too: the last bits of a sigmoid depend on the number of outputs.
                rows = self._features(outputs) if features else self._classes(outputs)
        except ValueError as error:
            raise UsageError(str(error)) from None
        is_finite = outputs.isfinite().flatten(1).all(1).tolist()
        for (key, image), row, known in zip(batch, rows, is_finite, strict=False):
            error = str(image) if isinstance(image, BadImage) else "" if known else NOT_FINITE
            yield {"key": key, "error": error} if error else {"key": key, **row}

    def _features(self, features: Tensor) -> list[dict[str, Any]]:
        return [{"features": each} for each in features.float().tolist()]

    def _classes(self, logits: Tensor) -> list[dict[str, Any]]:
        most, least = (TOP, 0.0) if self.threshold is None else (logits.shape[-1], self.threshold)
        probs, indices = self.task.probabilities(logits).topk(min(most, logits.shape[-1]))
        rows = []
        for p, i, count in zip(
            probs.tolist(), indices.tolist(), (probs >= least).sum(-1).tolist(), strict=True
        ):
            names = [self.classes[n] if self.classes else str(n) for n in i[:count]]
            rows.append(dict(zip(self.schema.names[1:-1], (i[:count], names, p[:count]), strict=True)))
        return rows


def pool_size(workers: int | None) -> tuple[int, dict[str, float]]:
    """Returns the number of actors, by default as many as the cluster holds, and the resources of each.

    An actor takes a GPU and its share of the CPUs, or a CPU where there are no GPUs.

    Raises:
        UsageError: if the cluster can never hold so many.
    """
    most = most_resources()
    kind = "GPU" if most.get("GPU", 0) >= 1 else "CPU"
    room = int(most.get(kind, 0))
    if not room or (workers or 0) > room:
        raise UsageError(f"`workers` {workers or 1}: each takes one of the {room} {kind}s of the cluster")
    if kind == "CPU":
        return workers or room, {"num_cpus": 1.0}
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU")]
    share = min((node.get("CPU", 0) // node["GPU"] for node in nodes), default=1.0)
    return workers or room, {"num_gpus": 1.0, "num_cpus": max(1.0, share)}


def write_parts(out: str, tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Writes the file of each part, of which a table of predictions has all rows, and yields these.

    Raises:
        OSError: if writing fails.
    """
    for table in tables:
        schema = next(each for each in (SCHEMA, ABOVE, FEATURES) if {*each.names} <= {*table.column_names})
        for number in table["part"].unique().to_pylist():  # a part is never split over tables
            rows = table.filter(pc.field("part") == number).select(schema.names).cast(schema)
            content = pa.BufferOutputStream()
            pq.write_table(rows, content, compression="zstd")
            storage.write_bytes(storage.join(out, file_of(number)), content.getvalue().to_pybytes())
            yield rows


def predict_in_pool(
    parts: Sequence[ImagePart], *, workers: int, each: Mapping[str, float], **settings: Any
) -> Iterator[pa.Table]:
    """Predicts the parts in any order by actors that hold a model each.

    Args:
        each: the resources of an actor.
        settings: the arguments of `Predictor`.

    Raises:
        UsageError, OSError: as `Predictor`.
    """
    import ray.data

    logging.getLogger("ray.data").setLevel(logging.ERROR)  # it logs each execution at length
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = context.print_on_execution_start = False
    context.raise_original_map_exception = True
    predictions = ray.data.from_items(list(parts), override_num_blocks=len(parts)).map_batches(
        Predictor,
        batch_size=1,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(size=min(workers, len(parts))),
        fn_constructor_kwargs=settings,
        num_cpus=each["num_cpus"],
        num_gpus=each.get("num_gpus"),
    )
    try:
        yield from predictions.iter_batches(batch_size=None, batch_format="pyarrow")  # pyright: ignore[reportReturnType]
    except RayTaskError as error:
        raise error.cause from None


def predict_together(
    parts: Sequence[ImagePart], sharding: "Sharding", model: ModelRef, *, batch_size: int, **settings: Any
) -> Iterator[pa.Table]:
    """Predicts the parts in any order by workers that hold one model together, each another part. Arguments
    and errors are those of `predict_in_pool` and `Sharding.answers`.
    """
    settings |= {"model": model, "batch_size": batch_size}
    passes = -(-max(part["stop"] - part["first"] for part in parts) // batch_size)

    def work(loaded: Model, put: Callable[[pa.Table], None]) -> None:
        predictor, (rank, ranks) = Predictor(**settings, shared=loaded), this_rank()
        for first in range(0, len(parts), ranks):
            mine = parts[first + rank] if first + rank < len(parts) else None
            put(predictor.table(mine, passes))

    yield from sharding.answers(model, work, batch_size=batch_size * sharding.workers)

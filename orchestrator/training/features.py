"""What a frozen image tower makes of the images of a data set, computed once for all steps and runs.

Source: LiT (Zhai et al. 2022, https://arxiv.org/abs/2111.07991), whose image tower does not change: without
augmentation, its output for an image is always the same.

The features lie in ``<storage>/features/<key>/<split>/``, a file for `ROWS` images. The key depends on all
that they depend on. A computation that breaks off goes on after the files that there are.
"""

import hashlib
import io
import json
import logging
from dataclasses import asdict, replace

import numpy as np
import torch

from moe.codec import to_dict
from moe.model import Model
from moe.parallel import sum_over_ranks, whole
from orchestrator import storage
from orchestrator.config import RunConfig
from orchestrator.data.stream import Stream
from orchestrator.training.fewshot import Selection, frozen_features

log = logging.getLogger(__name__)
ROWS = 4096  # images of a file


def can_be_stored(run: RunConfig) -> bool:
    """Returns whether the image tower is frozen, and its output for an image is the same in every step, as
    where images do not vary and are routed one by one.
    """
    tower, moe = run.model.starts_from, run.model.moe
    alone = moe is None or moe.images_per_group == 1
    frozen = any(tower.startswith(prefix) for prefix in run.train.freeze)
    return bool(tower) and frozen and alone and not run.data.augment


def with_features(stream: Stream, model: Model, device: torch.device) -> Stream:
    """Returns the stream with the features of its images, which are computed where they are not stored. All
    workers call it together.
    """
    run, everything = stream.run, replace(stream, plan=None, fields={})
    folder = storage.join(run.storage, "features", _key(model, everything), stream.split)
    found = []
    for first in range(0, stream.epoch(), ROWS):
        file = storage.join(folder, f"{first:010d}.npy")
        # What the first worker sees counts for all.
        there = stream.rank == 0 and storage.size(file) is not None
        if sum_over_ranks(torch.tensor(float(there))):
            stored = np.load(io.BytesIO(storage.read_bytes(file)), allow_pickle=False)
        else:
            rows = np.arange(first, min(first + ROWS, stream.epoch()))
            frozen = frozen_features(model, Selection(**vars(everything), indices=rows), device)
            stored = np.where(frozen.valid[:, None], frozen.x, np.nan).astype(np.float32)
            if stream.rank == 0:
                buffer = io.BytesIO()
                np.save(buffer, stored, allow_pickle=False)
                storage.write_bytes(file, buffer.getvalue())
                log.info("%s: features of %d of %d images", run.name, rows[-1] + 1, stream.epoch())
        found.append(stored)
    return replace(stream, features=np.concatenate(found))


def _key(model: Model, stream: Stream) -> str:
    """Returns a digest of the tower's weights and buffers, of its config, and of how images come to it."""
    run, tower = stream.run, model.config.starts_from
    digest = hashlib.sha256()
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, tensor in sorted(tensors.items()):
        if name.startswith(tower):
            digest.update(name.encode())
            digest.update(whole(tensor).cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    image = to_dict(model.config)[tower.rstrip(".")]
    about = [image, asdict(stream.transform), run.compute_dtype(), stream.data.manifest.digest()]
    digest.update(json.dumps(about).encode())
    return digest.hexdigest()[:32]

"""A model that MLflow serves: encoded images in, the likeliest class of each and its probability out.

A copy lies beside the weights, with `moe` and the transform of images: this module needs no more of ours.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from mlflow.exceptions import MlflowException

from moe.exported import CONFIG, load
from moe.signature import SIGNATURE, read_signature
from orchestrator.data.batch import normalize
from orchestrator.data.images import BadImage, Transform
from orchestrator.data.preparation import Preparation

IMAGES_PER_PASS = 64


class ImageClassifier:
    """A model in evaluation. `predict` takes images as bytes of a JPEG, PNG or other format, or as their
    base64, in a column `image` or as the only column.
    """

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / CONFIG).read_text())
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.threads = torch.get_num_threads()
        self.model = load(folder, self.device)
        self.signature = known = read_signature(config[SIGNATURE])
        self.preparation = Preparation.of(known)
        self.transform = Transform.of(known)

    @torch.inference_mode()
    def predict(self, images: pd.DataFrame, params: Mapping[str, Any] | None = None) -> pd.DataFrame:
        """Returns the columns `label`, a number if the names of the classes are unknown, and `probability`,
        with the index of `images`. On a CPU an answer depends, to the bit, on no images but those that are
        routed together, and on no number of threads.

        Raises:
            MlflowException: for a bad image, with the code that the server answers as 400, and for outputs
                that are not finite.
        """
        if images.empty:
            return pd.DataFrame({"label": [], "probability": []}, index=images.index)
        pixels = torch.stack([self._decoded(row, image) for row, image in enumerate(images.iloc[:, 0])])
        group = self.signature.images_per_group
        if self.device.type == "cpu":
            found = self._by_itself(pixels.split(group))
        else:
            passes = pixels.split(max(1, IMAGES_PER_PASS // group) * group)
            found = [self._probabilities(each) for each in passes]
        probabilities = torch.cat(found)
        is_finite = probabilities.isfinite().all(-1)
        if not is_finite.all():
            row = int(is_finite.logical_not().nonzero()[0])
            raise MlflowException(f"image {row}: the model's outputs are not finite")
        probability, best = probabilities.max(-1)
        names = self.signature.classes
        labels = [names[i] if names else str(i) for i in best.tolist()]
        return pd.DataFrame({"label": labels, "probability": probability.double().cpu()}, index=images.index)

    def _by_itself(self, groups: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the probabilities of groups, each in a pass and a thread of its own: the last bits of what
        torch computes depend on the number of rows, and of threads.
        """

        def in_one_thread(images: torch.Tensor) -> torch.Tensor:
            torch.set_num_threads(1)
            return self._probabilities(images)

        try:
            with ThreadPoolExecutor(self.threads) as pool:
                return [*pool.map(in_one_thread, groups)]
        finally:
            torch.set_num_threads(self.threads)  # of threads that begin later

    @torch.inference_mode()
    def _probabilities(self, images: torch.Tensor) -> torch.Tensor:
        """Returns NaN for an image whose outputs are not finite."""
        logits = self.model(normalize(images.to(self.device))).logits.float()
        found = logits.sigmoid() if self.signature.output == "sigmoid" else logits.softmax(-1)
        return found.where(logits.isfinite().all(-1, keepdim=True), torch.nan)

    def _decoded(self, row: int, image: bytes | str) -> torch.Tensor:
        try:
            return self.transform(self.preparation.prepare(_encoded(image)))
        except (BadImage, ValueError, TypeError) as error:
            raise MlflowException.invalid_parameter_value(f"image {row}: {error}") from None


def _encoded(image: bytes | str) -> bytes:
    """The image itself. MLflow decodes base64 in some of its formats of JSON, and leaves it in others."""
    try:
        return base64.b64decode(image, validate=True)
    except ValueError:
        if isinstance(image, str):
            raise
        return image


def _load_pyfunc(path: str) -> ImageClassifier:
    """The name and the argument are MLflow's."""
    return ImageClassifier(Path(path))

"""The 1,797 8x8 images that ship inside scikit-learn."""

from typing import Any

from sklearn.datasets import load_digits

from orchestrator.data.sources.arrange import Found, arrange
from orchestrator.data.sources.source import Source
from orchestrator.data.sources.stored import png


def digits(val_frac: float) -> Source[bytes]:
    bundled: Any = load_digits()
    images = (bundled.images * (255 / 16)).round().astype("uint8")
    found = [
        Found(png(image), int(label), f"digit-{i:04d}")
        for i, (image, label) in enumerate(zip(images, bundled.target, strict=True))
    ]
    classes, splits = arrange(found, val_frac=val_frac, order="listed")
    return Source(classes=classes, splits=splits, fetch=iter)

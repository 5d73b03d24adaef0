"""Writes orchestrator/evaluation/imagenet.csv: the names of ImageNet-1k's classes in three spellings.

  python bench/imagenet_names.py

Sources: timm's `ImageNetInfo` has the ids of WordNet, and its words as Hugging Face has them too; torchvision
has its own names in `torchvision.models._meta`. Both are in the order of the ids.
"""

import csv
from pathlib import Path

from timm.data.imagenet_info import ImageNetInfo
from torchvision.models import _meta

OUT = Path(__file__).parents[1] / "orchestrator" / "evaluation" / "imagenet.csv"
HEADER = ("wnid", "timm, Hugging Face", "torchvision")


def rows() -> list[tuple[str, str, str]]:
    """Returns the three names of each class."""
    timms = ImageNetInfo("imagenet-1k")
    words = [str(timms.index_to_description(label)) for label in range(1000)]
    return [*zip(timms.label_names(), words, _meta._IMAGENET_CATEGORIES, strict=True)]


def main() -> None:
    with OUT.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([HEADER, *rows()])


if __name__ == "__main__":
    main()

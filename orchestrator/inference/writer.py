"""A process that writes trained models as ONNX: several of them write a sweep's on all processors.

python -m orchestrator.inference.writer    reads a job as JSON, and prints why each model failed, as JSON
"""

import json
import sys
from collections.abc import Iterator
from typing import TypedDict

import torch

from orchestrator.checkpoint.graphs import write_onnx
from orchestrator.checkpoint.models import read_model
from orchestrator.errors import UsageError
from orchestrator.plugins import restored


class WriterJob(TypedDict):
    """Locations of models -> the files to write. `plugins`: those that the models need -> their texts."""

    files: dict[str, str]
    plugins: dict[str, str]


def written(job: WriterJob) -> Iterator[str]:
    """Yields for each model why it cannot be written, empty if it was."""
    restored({plugin: text.encode() for plugin, text in job["plugins"].items()})
    for location, path in job["files"].items():
        try:
            model = read_model(location)
            write_onnx(model.load(), path, model.signature)
        except (UsageError, torch.onnx.OnnxExporterError) as error:
            yield str(error).partition("\n")[0] or type(error).__name__
        else:
            yield ""


if __name__ == "__main__":
    for why in written(json.load(sys.stdin)):
        print(json.dumps(why), flush=True)

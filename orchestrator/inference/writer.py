"""A process that writes trained models as ONNX: several of them write a sweep's on all processors.

python -m orchestrator.inference.writer    reads a job as JSON, and prints why each model failed, as JSON
"""

import json
import sys
from collections.abc import Iterator
from typing import Any, TypedDict

import torch

from moe.codec import from_dict
from moe.overrides import RoutingOverrides
from orchestrator.checkpoint.graphs import write_onnx
from orchestrator.checkpoint.models import read_model
from orchestrator.errors import UsageError
from orchestrator.plugins import restored


class WriterJob(TypedDict):
    """Models: the location of each, the operating point (fields of `RoutingOverrides`) and the file to write.
    `plugins`: those that the models need -> their texts.
    """

    models: list[tuple[str, dict[str, Any], str]]
    plugins: dict[str, str]


def written(job: WriterJob) -> Iterator[str]:
    """Yields for each model why it cannot be written, empty if it was."""
    restored({plugin: text.encode() for plugin, text in job["plugins"].items()})
    for location, point, path in job["models"]:
        try:
            model = read_model(location).at_point(from_dict(RoutingOverrides, point))
            write_onnx(model.load(), path, model.signature)
        except (UsageError, torch.onnx.OnnxExporterError) as error:
            yield str(error).partition("\n")[0] or type(error).__name__
        else:
            yield ""


if __name__ == "__main__":
    for why in written(json.load(sys.stdin)):
        print(json.dumps(why), flush=True)

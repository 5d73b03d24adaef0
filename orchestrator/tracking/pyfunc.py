"""Models in the format of `mlflow.pyfunc`: with the code that opens them, for places without this project.

There is no pickle in it, and no path of the machine that trained.
"""

import json
import shutil
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

import mlflow.pyfunc
import numpy as np
import pandas as pd
from mlflow.models import Model as MLmodel, ModelSignature
from mlflow.types import ColSpec, Schema

import moe
from moe.cost import num_params
from moe.exported import CONFIG, WEIGHTS
from moe.signature import SIGNATURE
from orchestrator import storage
from orchestrator.checkpoint.models import ModelRef
from orchestrator.checkpoint.weights import write_file
from orchestrator.codec import to_dict
from orchestrator.data.images import encode_png
from orchestrator.errors import UsageError
from orchestrator.tracking import served

MOE = Path(moe.__file__).parent
# Without their __init__.py they are namespace packages, which never hide an installed orchestrator.
FILES = (
    *(
        "data/augment/base.py",
        "data/batch.py",
        "data/images.py",
        "data/preparation.py",
        "data/undecodable.py",
    ),
    *("errors.py", "tracking/served.py"),
)
PACKAGES = ("mlflow", "numpy", "pandas", "pillow", "safetensors", "torch", "torchvision")
INPUTS = Schema([ColSpec("binary", "image")])
OUTPUTS = Schema([ColSpec("string", "label"), ColSpec("double", "probability")])
SMALL = 25_000_000  # parameters, 100 MB: a larger model is copied by choice alone


def is_small(source: ModelRef) -> bool:
    """Returns whether a model may be copied without being asked for."""
    return num_params(source.run.model) <= SMALL


def is_servable(source: ModelRef) -> bool:
    """Returns whether a model classifies images, without a plugin: plugins are not packed."""
    return source.run.task.classifies and not source.run.plugins


def write_pyfunc(source: ModelRef, out: str, mlmodel: MLmodel | None = None) -> None:
    """Writes what ``mlflow.pyfunc.load_model(out)`` opens into a local folder that does not exist.

    Args:
        mlmodel: what is known of the model in MLflow.

    Raises:
        UsageError: if the model is not `is_servable`, `out` is not local, or the weights are damaged.
        OSError: if writing fails.
    """
    if not is_servable(source):
        raise UsageError(
            f"{source.name} cannot be packed for MLflow, which takes models that classify images and need no"
            " plugin"
        )
    if not storage.is_local(out):
        raise UsageError(f"{out}: models are packed into a local folder")
    config = {
        "name": source.run.name,
        "step": source.step,
        SIGNATURE: to_dict(source.signature),
        "model": to_dict(source.run.model),
    }
    side = source.run.model.image_side()
    example = pd.DataFrame({"image": [encode_png(np.full((side, side, 3), 127, "uint8"))]})
    with TemporaryDirectory() as folder:
        work = Path(folder)
        write_file(f"{work}/model/{WEIGHTS}", source.load().state_dict(), {"format": "pt"})
        (work / "model" / CONFIG).write_text(json.dumps(config, indent=1))
        python = [
            *MOE.rglob("*.py"),
            *MOE.rglob("*.pyi"),
            *(MOE.parent / "orchestrator" / name for name in FILES),
        ]
        for file in python:
            copy = work / file.relative_to(MOE.parent)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
        mlflow.pyfunc.save_model(
            out,
            loader_module=served.__name__,
            data_path=f"{work}/model",
            code_paths=[f"{work}/moe", f"{work}/orchestrator"],
            input_example=example,
            signature=ModelSignature(INPUTS, OUTPUTS),
            metadata={"moe_frontier": config},
            pip_requirements=[f"{name}=={version(name).partition('+')[0]}" for name in PACKAGES],
            mlflow_model=mlmodel or MLmodel(),
        )

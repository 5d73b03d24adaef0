"""The model behind a name of MLflow's registry."""

from moe.vit import ViT
from orchestrator.checkpoint.manifest import located
from orchestrator.checkpoint.weights import load_newest
from orchestrator.errors import UsageError
from orchestrator.tracking.registry import checkpoint_of


def load_model(uri: str, tracking_uri: str | None = None) -> ViT:
    """The torch module behind ``models:/<name>@<alias>`` or ``models:/<name>/<version>``, its weights read
    from the checkpoint in the run's storage.

    Without `tracking_uri`, MLflow's own holds (MLFLOW_TRACKING_URI). Raises UsageError if there is none, or
    if other weights are there than were registered.
    """
    checkpoint, run, digest = checkpoint_of(uri, tracking_uri)
    folder, manifest = located(checkpoint)
    if manifest.weights_digest() != digest:
        raise UsageError(f"{uri}: {folder} holds other weights than were registered under that name")
    model = ViT(run.model)
    load_newest(checkpoint, model)
    return model.eval()

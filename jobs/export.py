"""Write a model, or the average of several (a soup), as one safetensors file or a folder; list checkpoints.

Either is loaded with `moe`, torch and safetensors alone; a folder has a config and a model card too. Every
command accepts the file as a model. Other formats are for other programs.

python jobs/export.py soft --out soft.safetensors        the newest whole checkpoint of a run
python jobs/export.py soft --out soft                    model.safetensors and config.json
python jobs/export.py models:/quickstart@pareto-best --out best.safetensors
python jobs/export.py quickstart/trials/w16-soft-seed0 --step 120 --out arm.safetensors
python jobs/export.py s3://bucket/runs/soft/checkpoints --out soft.safetensors
python jobs/export.py dense --out dense-timm --format timm             dense models: timm opens the folder
python jobs/export.py dense --out dense-hf --format huggingface        dense models: transformers opens it
python jobs/export.py soft --out soft-mlflow --format mlflow           mlflow models serve -m soft-mlflow
python jobs/export.py soft --out soft.onnx --format onnx               onnxruntime runs it
python jobs/export.py soft --out soft.pt2 --format torch               torch.export.load opens it
python jobs/export.py soft --ema --out averaged.safetensors        of a run with train.ema
python jobs/export.py soft --list                        exit code 1 if a checkpoint is damaged
python jobs/export.py tuned0 tuned1 tuned2 --out soup.safetensors --evaluate
python jobs/export.py tuned0 tuned1 tuned2 --out soup.safetensors --greedy --data held-out     those that help
python jobs/export.py runs/tuned/checkpoints/step-000008* --out soup.safetensors        steps of one run
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from jobs._cli import Evaluation, check_file, check_out, command, models_of, named
from jobs._flags import MODELS, flag, parse
from jobs.evaluate import EvaluateFlags, evaluate
from moe.config import did_you_mean
from moe.guests import offered
from orchestrator.errors import UsageError
from orchestrator.evaluation.kinds import EvaluationConfig

if TYPE_CHECKING:
    from orchestrator.checkpoint.models import ModelRef


FOLDERS = offered("FOLDERS")  # format of another project -> the module that writes it
GRAPHS = {  # format -> ending of its file, function of `checkpoint/graphs.py` that writes it, help
    "torch": (".pt2", "write_program", "a file of torch.export (.pt2)"),
    "onnx": (".onnx", "write_onnx", "a file of ONNX (.onnx), which needs moe-frontier[export]"),
}
FORMATS = ("moe", *FOLDERS, "mlflow", *GRAPHS)


def format_name(text: str) -> str:
    """Reads --format. Raises UsageError for a format that does not exist."""
    if text not in FORMATS:
        hint = did_you_mean(text, FORMATS, str) or f"; known: {', '.join(FORMATS)}"
        raise UsageError(f"unknown format {text!r}{hint}")
    return text


@dataclass(frozen=True, kw_only=True)
class ExportFlags:
    model: tuple[str, ...] = flag(
        help=f"{MODELS}; of several models the average is written", positional=True, nargs="+"
    )
    step: int | None = flag(None, "export this checkpoint and no other; default: the newest whole checkpoint")
    out: str | None = flag(None, "local file, ending in .safetensors; any other name is a local folder")
    format: str = flag(
        "moe",
        f"who reads it: moe; {', '.join(FOLDERS)}: a folder for that library, if the model is dense; mlflow:"
        " a folder that MLflow serves; "
        + "; ".join(f"{name}: {what}" for name, (_, _, what) in GRAPHS.items()),
        read=format_name,
    )
    images_per_group: int | None = flag(
        None,
        "route so many images together, a divisor of the number in training; 1: each by itself, so that no"
        " answer depends on other images. evaluate.py --set routing.images_per_group=1 says how good it is",
        least=1,
    )
    ema: bool = flag(False, "write the average over the run's updates (train.ema) as the weights")
    list: bool = flag(False, "print step, quality, size and state of each checkpoint")
    fresh: bool = flag(False, "replace an earlier export at --out")
    greedy: bool = flag(
        False, "average only the models that make the soup better on --data: images that no figure is from"
    )
    evaluate: bool = flag(False, "also evaluate each model and their average, as evaluate.py does")
    on: Evaluation

    def __post_init__(self) -> None:
        if (self.out is None) == (not self.list):
            raise UsageError("give either --out or --list")
        if self.on.data and not (self.evaluate or self.greedy):
            raise UsageError("--data does nothing without --evaluate or --greedy")
        if self.greedy and not (self.averages() and self.on.data):
            raise UsageError("--greedy chooses among several models by held-out images: give --data")
        if self.greedy and self.on.split == "train":
            raise UsageError(
                "--greedy chooses by images that no model was trained on, and not by a train split"
            )
        if self.greedy and self.evaluate:
            raise UsageError(
                "--evaluate would measure the soup on the images that chose it: evaluate it on others, by"
                " evaluate.py"
            )
        if self.averages() and (self.list or self.step is not None):
            raise UsageError("--list and --step take one model; name the folders of checkpoints instead")
        if self.ema and (self.averages() or self.list or self.format != "moe"):
            raise UsageError("--ema takes one run, and --format moe: write its average first, then others")
        if self.images_per_group and (self.averages() or self.list):
            raise UsageError("--images-per-group takes one model: write the average first, then others")
        if self.averages() and self.format != "moe":
            raise UsageError(f"--format {self.format} takes one model: write the average first, then that")
        ending = GRAPHS[self.format][0] if self.format in GRAPHS else ""
        if self.out and not self.out.endswith(ending):
            raise UsageError(f"--format {self.format} writes a file: end --out in {ending}")
        if self.out and self.format in ("mlflow", *FOLDERS) and self.out.endswith(".safetensors"):
            raise UsageError(f"--format {self.format} writes a folder: give --out without .safetensors")
        if self.evaluate and not self.averages():
            raise UsageError("--evaluate compares several models with their average; give several")

    def averages(self) -> bool:
        return len(self.model) > 1 or any(name.startswith("sweep:") for name in self.model)


def main() -> None:
    flags = parse(ExportFlags, __doc__)
    doing = "averaging" if flags.averages() else "listing checkpoints of" if flags.list else "exporting"
    places = flags.on.places if flags.averages() else None
    with command(f"{doing} {named(flags.model)}", places, plugins=flags.on.places.plugin):
        if flags.averages():
            average(flags)
        else:
            export(flags)


def export(flags: ExportFlags) -> None:
    """Writes the weights, or lists checkpoints and exits with 1 if one of them is damaged.

    Raises:
        UsageError: if there is no such checkpoint, or --out exists already or is a folder of other files.
    """
    from moe.exported import WEIGHTS
    from orchestrator import storage
    from orchestrator.checkpoint import export as exports
    from orchestrator.checkpoint.files import SUFFIX
    from orchestrator.checkpoint.manifest import folder_of, is_there, steps
    from orchestrator.evaluation.models import model_location

    (model,), places = flags.model, flags.on.places
    location = model_location(model, root=places.root(), tracking_uri=places.tracking_uri)
    if location.endswith(SUFFIX):
        if flags.format == "moe":
            raise UsageError(f"{location} is a file of weights already, and checkpoints are exported")
        if flags.step is not None or flags.ema:
            raise UsageError(f"--step and --ema are of a run: {model} is a file of weights")
        folder, _, name = location.rpartition("/")
        return convert(flags, location, apart=folder if name == WEIGHTS else location)
    is_single = is_there(location)
    directory = location.rpartition("/")[0] if is_single else location
    found = steps(directory)
    if flags.step is not None:
        if is_single:
            raise UsageError(f"--step {flags.step}: {model} is a single checkpoint")
        if flags.step not in found:
            listed = ", ".join(map(str, found))
            raise UsageError(f"no checkpoint of step {flags.step} in {directory}; of: {listed}")
        found, location = [flags.step], folder_of(directory, flags.step)
    if flags.out is None:
        raise SystemExit(0 if print_states(directory, found) else 1)
    if flags.format != "moe":
        return convert(flags, location, apart=directory.removesuffix("/checkpoints"))
    out = storage.absolute(flags.out)
    is_file = flags.out.endswith(SUFFIX)
    if is_file:
        check_file("--out", out)
    elif storage.is_local(out):
        check_out(out, own=(WEIGHTS,), apart=(directory.removesuffix("/checkpoints"),))
    exports.export(location, out, ema=flags.ema, images_per_group=flags.images_per_group, fresh=flags.fresh)
    print_exported(out, out if is_file else storage.join(out, WEIGHTS))


def convert(flags: ExportFlags, location: str, *, apart: str) -> None:
    """Writes the model for other programs, and prints how they open it.

    Args:
        apart: the folder of the source, which the results must not overlap with.

    Raises:
        UsageError: if the format cannot express the model, or --out exists already.
    """
    from moe.exported import WEIGHTS
    from orchestrator import storage
    from orchestrator.checkpoint import graphs
    from orchestrator.checkpoint.export import check_export
    from orchestrator.checkpoint.models import read_model
    from orchestrator.tracking.pyfunc import write_pyfunc

    assert flags.out
    out = storage.absolute(flags.out)
    source = read_model(location).in_groups(flags.images_per_group)
    if not source.run.model.image_side():
        raise UsageError(f"--format {flags.format} takes models of images, and {source.name} reads none")
    if flags.format in FOLDERS:
        guest = import_module(FOLDERS[flags.format])
        folder = guest.foreign_folder(flags.format, source)
        check_export(out, fresh=flags.fresh)
        check_out(out, own=(WEIGHTS,), apart=(apart,))
        guest.write_foreign(out, folder, source, fresh=flags.fresh)
        print(f"{out}: {folder.opens.format(out=out)}")
        return
    if flags.format == "mlflow":
        check_out(out, own=("MLmodel",), apart=(apart,))
        if storage.names(out):
            if not flags.fresh:
                raise UsageError(f"{out} holds an export already; `fresh` replaces it")
            shutil.rmtree(out)
        write_pyfunc(source, out)
        print(f"{out}: mlflow.pyfunc.load_model({out!r})")
        return
    check_file("--out", out)
    if storage.size(out) is not None and not flags.fresh:
        raise UsageError(f"{out} exists already; `fresh` replaces it")
    model = source.load()
    write = getattr(graphs, GRAPHS[flags.format][1])
    off, group = write(model, out, source.signature), model.config.images_per_group
    said = f"largest difference {off:.1e} of the largest output, on random images"
    print(f"{out}: images (B, 3, H, W) in -1..1, any B; {said}")
    if group > 1:
        print(
            f"  {group} consecutive images are routed together, and an answer depends on them;"
            " --images-per-group 1 writes a graph that routes each by itself"
        )
    print(f"its metadata `signature`, JSON: {source.signature}")


def average(flags: ExportFlags) -> None:
    """Writes the average; with --evaluate evaluates each model and the average, with --greedy chooses the
    models first.
    """
    from moe.codec import from_dict
    from orchestrator import storage
    from orchestrator.evaluation.soup import check_alike, greedy, quality_of_average, write_soup

    assert flags.out
    on, out = flags.on, storage.absolute(flags.out)
    check_file("--out", out)
    models = models_of(flags.model, on.places)
    check_alike(models)
    path, chosen_on = on.path(models[0]), None
    if flags.evaluate or flags.greedy:
        models[0].check_classes(path)
    if flags.greedy:
        chosen_on = f"{path}, {on.split}"

        def quality_of(members: Sequence[ModelRef]) -> float:
            quality = quality_of_average(members, on.images(models[0], path))
            print(f"{' + '.join(member.name for member in members)}: {quality:.4f}", flush=True)
            return quality

        models = greedy(models, quality_of)
    write_soup(models, out, fresh=flags.fresh, chosen_on=chosen_on)
    print_exported(out, out)
    if flags.evaluate:
        evaluate(EvaluateFlags(model=(*flags.model, out), how=from_dict(EvaluationConfig, {}), on=on))


def print_states(directory: str, steps: list[int]) -> bool:
    """Prints a line per checkpoint, after hashing its files; returns whether all are whole."""
    from orchestrator.checkpoint import manifest as manifests

    found = [manifests.read_or_none(manifests.folder_of(directory, step)) for step in steps]
    quality_name = next((manifest.task().quality for manifest in found if manifest), "quality")
    print(f"{'step':>9} {quality_name:>9} {'MB':>9}  state")
    all_whole = True
    for step in steps:
        folder, quality = manifests.folder_of(directory, step), manifests.quality_of(directory, step)
        megabytes = ""
        try:
            manifest = manifests.read(folder)
            megabytes = f"{manifest.size() / 1e6:.1f}"
            manifests.verify_checkpoint(folder)
            state = "whole" if manifest.has_optimizer() else "whole, weights only"
        except manifests.DamagedError as error:
            all_whole, state = False, f"damaged: {error}"
        shown = "" if quality is None else f"{quality:.4f}"
        print(f"{step:9} {shown:>9} {megabytes:>9}  {state}", flush=True)
    return all_whole


def print_exported(out: str, weights: str) -> None:
    """Prints what the file of weights holds, and how Python loads it."""
    from safetensors import safe_open

    from moe.cost import num_params
    from moe.model import ModelConfig
    from orchestrator import storage
    from orchestrator.codec import read_config

    with safe_open(weights, "pt") as file:
        metadata, tensors = file.metadata(), len(file.keys())
    soup = json.loads(metadata.get("soup", "[]"))
    what = f"average of {len(soup)} models" if soup else f"step {metadata['step']}"
    what = f"average of the weights to {what}" if "ema" in metadata else what
    params = num_params(read_config(ModelConfig, json.loads(metadata["config"])["model"]))
    size = (storage.size(weights) or 0) / 1e6
    print(f"{weights}: {what}, {tensors} tensors, {params:,} parameters, {size:.1f} MB")
    print(f"from moe import load; model = load({out!r})")


if __name__ == "__main__":
    main()

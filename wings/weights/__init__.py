"""Weights of other projects as models of ours.

A project is a file that recognises its tensors by name, and gives their names (`kind.TensorNames`) and what
they do not say (`kind.Facts`). The rest is the same for all: `plan_import` decides on shapes, and
`write_import` reads and writes.
"""

import hashlib
import json
import logging
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor

from moe.adapt import shapes_of
from moe.config import members
from moe.exported import CONFIG, WEIGHTS
from moe.model import ModelConfig
from moe.models.vit import ViTConfig
from moe.signature import SIGNATURE, read_signature
from orchestrator import storage
from orchestrator.checkpoint.export import write_export
from orchestrator.checkpoint.files import SUFFIX
from orchestrator.checkpoint.models import ModelRef
from orchestrator.checkpoint.weights import read_metadata, signature_of
from orchestrator.codec import override, to_dict
from orchestrator.config import DataConfig, RunConfig
from orchestrator.data.images import eval_settings, resized_side
from orchestrator.data.preparation import AS_IT_IS, Preparation
from orchestrator.errors import UsageError, reason_of
from orchestrator.names import run_name
from orchestrator.tasks import ClassificationConfig, TaskConfig
from wings.image_text.contrastive import ContrastiveConfig
from wings.weights import flax, huggingface, timm, torchvision, towers
from wings.weights.copies import pick
from wings.weights.kind import Facts, Resize
from wings.weights.mapping import ImportPlan, plan_vit, vit_of
from wings.weights.outward import ForeignFolder, write_foreign as write_foreign
from wings.weights.tensors import ForeignWeights, Lazy, format_of, open_foreign, shortened
from wings.weights.towers import plan_towers, split_towers

log = logging.getLogger(__name__)

KINDS = (timm.KIND, huggingface.KIND, torchvision.KIND, flax.KIND)
SAID = ("data.mean", "data.std")
ROUTING = ("k", "capacity_factor", "capacity_rounding", "priority", "topk")
# Names that betray a part that our model has not.
LACKING = {
    r"(.*\.)?(reg_token|register_tokens)$": "register tokens",
    r"(.*\.)?(dist_token|head_dist\..*|distillation_token)$": "a distillation token",
    r"(.*\.)?(norm_pre|pre_layrnorm|pre_layernorm)\..*": "a norm before the blocks",
    r"(.*\.)?fc_norm\..*": "a norm after the mean of the tokens",
    r".*mlp\.(w12|w3|fc1_g|fc1_x|weights_in|gate_proj)\b.*": "SwiGLU",
    r".*(relative_position|rel_pos|\.lambda_[12]|\.gamma_[12])\b.*": "relative positions, or BEiT",
    r"(.*\.)?layers\.\d+\.blocks\..*": "Swin's stages",
    r".*blocks\.\d+\.attns\..*": "parallel attention",
    r".*patch_embed\.backbone\..*": "a hybrid with a CNN before the transformer",
}


@dataclass(frozen=True, kw_only=True)
class Import:
    """A plan for weights that were opened.

    Attributes:
        run: our model, and how evaluation reads images for it.
        resized: from how many patches per side to how many positions are resized; None: not at all.
    """

    kind: str
    opened: ForeignWeights
    run: RunConfig
    plan: ImportPlan
    facts: Facts
    resized: tuple[int, int] | None

    def __str__(self) -> str:
        plan, model, data = self.plan, self.plan.vit, self.run.data
        how: dict[str, int] = {}
        for lazy in plan.tensors.values():
            if lazy.sources and lazy.how:
                how[lazy.how] = how.get(lazy.how, 0) + 1
        taken = sum(bool(lazy.sources) for lazy in plan.tensors.values())
        moe = model.moe
        experts = f", {moe.num_experts} experts in blocks {model.moe_blocks()}" if moe else ""
        lines = [
            f"{self.kind}: width {model.width}, {model.depth} blocks, {model.heads} heads, patches of"
            f" {model.patch_size}, {model.image_size} x {model.image_size} pixels, pooling {model.pooling},"
            f" {model.gelu} GELU{experts}",
            f"  {len(self.opened.tensors)} tensors read, {taken} of the model made from them",
            *(f"  {count} {what}" for what, count in how.items()),
            *(f"  {name}: {what}" for name, what in plan.made.items()),
        ]
        if text := getattr(plan.config, "text", None):
            lines.append(
                f"  text tower: width {text.width}, {text.depth} blocks, {text.heads} heads, {text.length} of"
                f" {text.vocabulary} tokens, pooling {text.pooling}; its tokenizer is not in the weights"
            )
        if self.resized:
            old, new = self.resized
            lines.append(
                f"  positions resized from {old} x {old} to {new} x {new} as the source's library does"
            )
        if plan.left_out:
            lines.append(f"  left out: {shortened(plan.left_out)}")
        lines += [f"  {note}" for note in (*self.opened.notes, *self.facts.assumed)]
        if moe:
            router = ", ".join(
                f"{name} {value}" for name, value in to_dict(moe.router).items() if name in ROUTING
            )
            lines.append(f"  routing, which the weights do not hold: {moe.images_per_group} images, {router}")
        settings = f"{data.eval_resize} side, crop {data.eval_crop:.4g}, {data.eval_interpolation}"
        folded = f"mean {self.facts.mean} and std {self.facts.std} are in the weights"
        unknown = "mean and std are not said, and have to be"
        lines.append(f"  evaluation: {settings}; {folded if self.facts.normalisation else unknown}")
        if self.facts.licence:
            lines.append(f"  licence: {self.facts.licence}")
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class PublishedImport(Import):
    """A plan for weights that a kind of model knows by their published names."""

    def __str__(self) -> str:
        taken = f"{len(self.plan.tensors)} of {len(self.opened.tensors)} tensors"
        return f"{self.kind}: {self.run.model.size()}, {taken}"


def plan_import(
    source: str, *, name: str, changes: Mapping[str, Any] | None = None, copy: str | None = None
) -> Import:
    """Recognises the weights at `source` and plans the model, without reading them.

    Args:
        name: of the model.
        changes: dotted fields, such as ``model.image_size``, or those of a router, which weights do not hold;
            and `SAID`, the source's normalisation of pixels in 0..1: ``imagenet``, ``half``, or numbers. With
            ``model.kind`` of ``two_towers`` both towers of big_vision are taken.
        copy: see `copies.pick`.

    Raises:
        UsageError: for weights of no known kind, of a model that ours cannot be, or that are not whole.
    """
    opened, changes = open_foreign(source), dict(changes or {})
    said = {field: changes.pop(field) for field in SAID if field in changes}
    if other := [field for field in changes if not field.startswith(("model.", "data.eval_"))]:
        raise UsageError(
            f"{other[0]} is no field of an imported model: model.*, data.eval_* and {', '.join(SAID)} are"
        )
    if own := _published(opened, name, changes, said):
        return own
    others: dict[str, Lazy] = {}
    try:
        if changes.get("model.kind") == "two_towers":
            tensors, others, notes = split_towers(opened.tensors)
            opened = replace(opened, tensors=tensors, notes=[*opened.notes, *notes])
            del changes["model.kind"]
        kind, tensors, notes = pick(opened.tensors, KINDS, copy)
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from None
    opened = replace(opened, tensors=tensors, notes=[*opened.notes, *notes])
    if lacking := _lacking(opened.tensors):
        raise UsageError(f"{source} has {lacking}, which the model here has not")
    if not kind:
        some = ", ".join([*opened.tensors][:3])
        known = ", ".join(kind.name for kind in KINDS)
        raise UsageError(f"{source} is of no known kind ({known}): it has {some}")
    heads = str(changes.get("model.heads", ""))
    try:
        tensors, names, facts = kind.read(opened)
        facts = _as_exported(facts, opened).normalised_by(said)
        plan = plan_vit(tensors, names, facts, heads=int(heads) if heads.isdecimal() else None)
        task: TaskConfig = ClassificationConfig(loss=facts.output)
        if others:
            plan = plan_towers(plan, others, facts)
            facts = replace(facts, assumed=(*facts.assumed, towers.ASSUMED))
            opened = replace(opened, tensors={**opened.tensors, **others})
            task = ContrastiveConfig(loss="sigmoid" if "b" in others else "softmax")
        data = DataConfig(**facts.evaluation)
        run = override(_Changeable(model=plan.config, data=data), changes).run(name, task)
    except UsageError as error:
        raise UsageError(f"{source}, read as weights of {kind.name}: {error}") from None
    except Exception as error:  # a config beside the weights may hold anything
        reason = f"settings that cannot be used: {reason_of(error)}"
        raise UsageError(f"{source}, read as weights of {kind.name}, has {reason}") from None
    facts = _with_classes(facts, plan.config.num_outputs())
    if run.model.kind != plan.config.kind:
        raise UsageError(f"weights of {kind.name} are those of a model of kind {plan.config.kind!r}")
    old, new = plan.vit.grid(), vit_of(run.model).grid()
    if old != new:
        name = "image.position_SD" if others else "position_SD"
        plan = replace(plan, tensors={**plan.tensors, name: _resized(plan, name, facts.resize, new)})
    _check_shapes(source, run.model, plan.tensors)
    return Import(
        kind=kind.name,
        opened=opened,
        run=run,
        plan=replace(plan, config=cast(Any, run.model)),
        facts=facts,
        resized=(old, new) if old != new else None,
    )


def _published(
    opened: ForeignWeights, name: str, changes: Mapping[str, Any], said: Mapping[str, Any]
) -> PublishedImport | None:
    """Plans the model of the kind that knows these tensors by their names; None if no kind does.

    Raises:
        UsageError: if a tensor is missing or of a wrong shape.
    """
    shapes = {theirs: lazy.shape for theirs, lazy in opened.tensors.items()}
    for member in members(ModelConfig):
        if (found := member.published(shapes)) is None:
            continue
        config, names = found
        if missing := [theirs for theirs in names.values() if theirs not in shapes]:
            raise UsageError(f"{opened.location}, read as weights of {config.kind}, lacks {missing[0]}")
        tensors = {ours: opened.tensors[theirs] for ours, theirs in names.items()}
        left_out = tuple(shapes.keys() - names.values())
        facts = Facts(heads=None, gelu="exact", resize=lambda table, _: table, mean=None, std=None)
        run = override(_Changeable(model=config, data=DataConfig()), changes).run(
            name, ClassificationConfig()
        )
        _check_shapes(opened.location, run.model, tensors)
        return PublishedImport(
            kind=config.kind,
            opened=opened,
            run=run,
            plan=ImportPlan(config=cast(Any, run.model), tensors=tensors, left_out=left_out, made={}),
            facts=facts.normalised_by(said),
            resized=None,
        )
    return None


def _check_shapes(source: str, model: ModelConfig, tensors: Mapping[str, Lazy]) -> None:
    """Raises UsageError, naming the first tensor that is not as the model has it."""
    with torch.device("meta"):
        expected = shapes_of(model.build(seed=None).state_dict())
    given = {name: lazy.shape for name, lazy in tensors.items()}
    if given != expected:
        wrong = sorted(name for name in {*given, *expected} if given.get(name) != expected.get(name))
        raise UsageError(
            f"{source}: the model has {wrong[0]} of shape {expected.get(wrong[0])}, the weights"
            f" {given.get(wrong[0])}"
        )


def _as_exported(facts: Facts, opened: ForeignWeights) -> Facts:
    """Adds what the signature of a model of ours says and the library has no place for, or rounds. Fields of
    the library that were changed since then go before.
    """
    tree = (opened.config or {}).get(SIGNATURE)
    if tree is None:
        return facts
    try:
        known = read_signature(tree)
    except ValueError as error:
        raise UsageError(str(error)) from None
    preparation, notes = Preparation.of(known), [*facts.assumed]
    if preparation != AS_IT_IS:
        notes.append(f"its signature: background {known.background}, white {known.white}")
    output, evaluation = facts.output, eval_settings(known)
    if "problem_type" not in (opened.config or {}) and known.output in ("softmax", "sigmoid"):
        output = known.output
    if _sides(known.image_size, evaluation) != _sides(known.image_size, facts.evaluation):
        notes.append("resize and crop are those of the library's fields, and not of its signature any more")
        evaluation = facts.evaluation
    return replace(facts, preparation=preparation, output=output, evaluation=evaluation, assumed=tuple(notes))


def _sides(size: int, evaluation: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns what is resized, to how many pixels, and how."""
    side = resized_side(size, evaluation["eval_crop"], evaluation["eval_pixels"])
    return evaluation["eval_resize"], side, evaluation["eval_interpolation"]


@dataclass(frozen=True, kw_only=True)
class _Changeable:
    """The parts of a run that changes to an imported model are about."""

    model: ModelConfig
    data: DataConfig

    def run(self, name: str, task: TaskConfig) -> RunConfig:
        """Returns a run of the model, whose batch has whole groups of images."""
        group = self.model.images_per_group
        data = replace(self.data, batch_size=group * math.ceil(self.data.batch_size / group))
        return RunConfig(name=run_name(name), model=self.model, data=data, task=task)


def _with_classes(facts: Facts, outputs: int) -> Facts:
    """Returns the facts with the names of classes by output, or without names, and why, if they are not
    exactly those of the outputs. Names are a list, or by number.
    """
    names = facts.classes
    if not names:
        return replace(facts, classes=None)
    by_number = names if isinstance(names, Mapping) else dict(enumerate(names))
    if all(str(name).startswith("LABEL_") for name in by_number.values()):  # what transformers makes up
        return replace(facts, classes=None)
    found = {str(number): str(name) for number, name in by_number.items()}
    if found.keys() == {*map(str, range(outputs))}:
        return replace(facts, classes=tuple(found[str(number)] for number in range(outputs)))
    ids = sorted(found, key=lambda number: (len(number), number))
    note = f"{len(found)} names of classes, numbered {ids[0]} to {ids[-1]}, for {outputs} outputs: left out"
    return replace(facts, classes=None, assumed=(*facts.assumed, note))


def write_import(planned: Import, out: str, *, fresh: bool = False) -> None:
    """Reads the weights and writes a folder as `checkpoint.export.export` does, with their source.

    Raises:
        UsageError: if there is an export in `out` and `fresh` is not set; the mean and std of pixels are not
            known; or a tensor is not finite.
    """
    _check_said(planned)
    tensors: dict[str, Tensor] = {}
    for name, lazy in planned.plan.tensors.items():
        tensors[name] = lazy.read().contiguous()
        if not bool(torch.isfinite(tensors[name]).all()):
            raise UsageError(f"{planned.opened.location}: {name} has values that are not finite")
    opened = planned.opened
    source = {
        "kind": planned.kind,
        "location": opened.location,
        "sha256": opened.sha256,
        "licence": planned.facts.licence,
    }
    facts = planned.facts
    signature = signature_of(
        planned.run,
        classes=facts.classes,
        preparation=facts.preparation,
        origin=(f"{planned.kind}, SHA-256 {opened.sha256}", facts.licence),
    )
    write_export(
        out,
        tensors,
        planned.run,
        signature=signature,
        fresh=fresh,
        more={"source": json.dumps(source)},
    )


def _check_said(planned: Import) -> None:
    if planned.facts.normalisation is None:
        raise UsageError(
            f"{planned.opened.location} does not say by which mean and std pixels were normalised: set"
            " `data.mean` to imagenet (which DeiT, MAE, DINO, DINOv2 and torchvision have), to half (Google's"
            " ViT and SigLIP), or to three numbers beside those of `data.std`"
        )


def foreign_folder(library: Literal["timm", "huggingface"], model: ModelRef) -> ForeignFolder:
    """Returns how another library describes a model.

    Raises:
        UsageError: if it cannot express the model.
    """
    if model.run.model.kind != "vit":
        raise UsageError(f"a model of kind {model.run.model.kind!r} exists here alone, and not in {library}")
    describe = timm.as_timm if library == "timm" else huggingface.as_transformers
    return describe(cast(ViTConfig, model.run.model), model.signature)


def is_foreign(location: str) -> bool:
    """Returns whether weights of another project are at a local place, and no model of ours."""
    path = Path(location)
    if path.is_dir():
        names = ("model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
        if any((path / name).is_file() for name in names):
            return True
        path = path / WEIGHTS
    if not path.is_file():
        return Path(f"{location.removesuffix('.index')}.index").is_file()
    form = format_of(path)
    if form != "safetensors":  # what is unknown may be a run's name; else it is refused with a reason
        return form != "unknown" or path.suffix not in ("", SUFFIX)
    try:
        return "config" not in read_metadata(str(path))
    except UsageError:
        return False


def import_once(source: str, root: str) -> str:
    """Returns the file that weights of another project were made into below `root`: now, or earlier.

    Raises:
        UsageError: if they cannot be.
    """
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(source).name.removesuffix(".index")).strip("-.") or "weights"
    try:
        planned = plan_import(source, name=name)
        _check_said(planned)
    except UsageError as error:
        raise UsageError(
            f"{error} (wings/jobs/import_weights.py takes what the weights do not say)"
        ) from None
    opened = planned.opened
    read = json.dumps([opened.sha256, opened.config, opened.preprocessor], sort_keys=True)
    folder = storage.join(root, "imports", f"{name}-{hashlib.sha256(read.encode()).hexdigest()[:12]}")
    if storage.size(storage.join(folder, CONFIG)) is None:
        log.info("%s", planned)
        write_import(planned, folder, fresh=True)
    return storage.join(folder, WEIGHTS)


def _lacking(names: Iterable[str]) -> str:
    """Says which part of a model is not in ours; empty if all are."""
    found = (
        f"{part} ({name})" for name in names for like, part in LACKING.items() if re.fullmatch(like, name)
    )
    return next(found, "")


def _resized(plan: ImportPlan, name: str, resize: Resize, new: int) -> Lazy:
    """The position embedding for `new` patches per side; the row of a class token stays."""
    first, old = int(plan.vit.pooling == "token"), plan.vit.grid()

    def of(position_SD: Tensor) -> Tensor:
        image_1DHW = position_SD[first:].T.reshape(1, -1, old, old)
        if position_SD.device.type == "meta":
            return position_SD.new_empty(first + new**2, position_SD.shape[1])
        return torch.cat([position_SD[:first], resize(image_1DHW, new).flatten(2)[0].T])

    return plan.tensors[name].map("", of)

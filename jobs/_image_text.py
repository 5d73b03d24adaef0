"""Evaluates models of images and texts: classes by their names, and captions and images by each other."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from jobs._cli import Evaluation, check_file, models_of, print_table
from jobs._record import Record
from jobs._sharded import Workers
from orchestrator.errors import UsageError

if TYPE_CHECKING:
    from moe.overrides import RoutingOverrides
    from orchestrator.checkpoint.models import ModelRef

KS = (1, 5, 10)
MOST_PIXELS = 2e8  # values of the images that others are compared with by their pixels: 0.8 GB


def evaluate_zero_shot(
    references: Sequence[str],
    file: str,
    on: Evaluation,
    by: Workers,
    point: RoutingOverrides,
    *,
    per_class: bool,
) -> list[dict[str, Any]]:
    """Classifies by the names and templates of a file, records and prints. Returns the figures for JSON."""
    from orchestrator.data.manifest import open_manifest
    from orchestrator.evaluation.evaluate import images_of
    from orchestrator.evaluation.image_text import nearest_pixels, read_class_names, zero_shot_scores

    names, record, reports = read_class_names(file), Record(on.places), []
    for model in with_text(references, on):
        model = model.in_groups(point.images_per_group)
        path = on.path(model)
        here = names.for_data(path)
        read = partial(images_of, model, path=path, split=on.split, batch_size=on.batch_size, fields={})
        find = partial(zero_shot_scores, names=here, point=point)
        scores = by.measure(model, lambda loaded, read=read, find=find: find(loaded, read()), on)
        found = {name: each.metrics() for name, each in scores.items()}
        pixels, other = None, "train" if on.split == "val" else "val"
        if open_manifest(path).rows(other) * 3 * model.run.model.image_side() ** 2 <= MOST_PIXELS:
            pixels = nearest_pixels(on.images(model, path, {}, split=other), on.images(model, path, {}))
        table = scores["all"].table(here.classes)
        report = {
            "model": model.name,
            "run": model.directory,
            "data": path,
            "split": on.split,
            "images": scores["all"].images(),
            "unread": scores["all"].unread,
            "metrics": {name: found["all"][name] for name in ("acc1", "acc5")},
            "baselines": {"chance": 1 / len(here.classes), "nearest_pixels": pixels},
            "templates": {name: each["acc1"] for name, each in found.items() if name != "all"},
            "classes": table,
        }
        reports.append(report)
        record_metrics(record, model, path, f"zero_shot/{on.split}", report["metrics"])
    first = reports[0]
    rows = [(r["model"], r["images"], r["metrics"]["acc1"], r["metrics"]["acc5"]) for r in reports]
    rows += [(), ("chance", "", first["baselines"]["chance"], "")]
    if (pixels := first["baselines"]["nearest_pixels"]) is not None:
        rows.append((f"nearest image of {'train' if on.split == 'val' else 'val'} by pixels", "", pixels, ""))
    count = f"{len(names.classes)} classes x {len(names.templates)} templates of {file}"
    print_table(("model", "images", "acc@1", "acc@5"), rows, title=f"{count}, on {first['data']}, {on.split}")
    for report in reports:
        by_template = sorted(report["templates"].items(), key=lambda entry: -entry[1])
        if len(by_template) > 1:
            print_table(("template", "acc@1"), by_template, title=f"{report['model']} by template")
        if per_class:
            cells = zip(*report["classes"].values(), strict=True)
            rows = [["-" if cell is None else cell for cell in row] for row in cells]
            print_table(report["classes"], rows, title=f"{report['model']} by class")
    record.send()
    return reports


def evaluate_retrieval(
    references: Sequence[str], on: Evaluation, by: Workers, page: str | None
) -> list[dict[str, Any]]:
    """Finds captions by images and images by captions, records and prints. Returns the figures for JSON.

    page: where to write the page of examples, of the first model.
    """
    from orchestrator import storage
    from orchestrator.evaluation.evaluate import images_of
    from orchestrator.evaluation.image_text import CAPTIONS, embed_pairs
    from orchestrator.evaluation.retrieval import chance_recall, image_ranks, recalls, text_ranks
    from orchestrator.evaluation.retrieval_page import retrieval_page

    if page:
        check_file("--page", page := storage.absolute(page))
    record, reports = Record(on.places), []
    for model in with_text(references, on):
        path = on.path(model)
        where = {"path": path, "split": on.split, "batch_size": on.batch_size, "fields": CAPTIONS}
        read = partial(images_of, model, **where)
        pairs = by.measure(model, lambda loaded, read=read: embed_pairs(loaded, read()), on)
        images, texts = len(pairs.image_ID), len(pairs.captions)
        metrics, chance = dict[str, float](), dict[str, float]()
        for name, ranks, candidates in (("i2t", image_ranks, texts), ("t2i", text_ranks, images)):
            found = ranks(pairs.image_ID, pairs.text_TD, pairs.image_T, pairs.words_T)
            metrics |= {f"{name}_{measure}": value for measure, value in recalls(found.ranks_Q, KS).items()}
            chance |= {f"{name}_r{k}": chance_recall(found.right_Q, candidates, k) for k in KS}
        report = {
            "model": model.name,
            "run": model.directory,
            "data": path,
            "split": on.split,
            "images": images,
            "captions": texts,
            "distinct_captions": int(pairs.words_T.max()) + 1,
            "metrics": metrics,
            "baselines": {"chance": chance},
        }
        if page and not reports:
            summary = (
                f"{model.name} on {path}, {on.split}: {images:,} images, {texts:,} captions; recall at 1"
                f" {metrics['i2t_r1']:.3f} from image to captions, {metrics['t2i_r1']:.3f} from caption to"
                " images"
            )
            html = retrieval_page("Retrieval", summary, pairs, on.images(model, path, {}))
            storage.write_bytes(page, html.encode())
        reports.append(report)
        record_metrics(record, model, path, f"retrieval/{on.split}", metrics)
    first = reports[0]
    columns = [
        f"{name}_{measure}" for name in ("i2t", "t2i") for measure in (*(f"r{k}" for k in KS), "median_rank")
    ]
    rows: list[Sequence[Any]] = [(r["model"], *(r["metrics"][name] for name in columns)) for r in reports]
    rows += [(), ("chance", *(first["baselines"]["chance"].get(name, "") for name in columns))]
    counts = (
        f"{first['images']:,} images, {first['captions']:,} captions, {first['distinct_captions']:,} distinct"
    )
    print_table(("model", *columns), rows, title=f"{counts}, of {first['data']}, {on.split}")
    print("i2t: images with one of their captions among the first k; equal scores of wrong answers are ahead")
    record.send()
    if page:
        print(f"page     {page}")
    return reports


def with_text(references: Sequence[str], on: Evaluation) -> list[ModelRef]:
    """The models, all of which read text. Raises UsageError if one does not."""
    from orchestrator.tasks.contrastive import text_of

    models = models_of(references, on.places)
    for model in models:
        try:
            text_of(model.run.model).tokenizer.check_known()
        except ValueError as error:
            raise UsageError(f"{model.name}: {error}") from None
    return models


def record_metrics(record: Record, model: ModelRef, path: str, name: str, metrics: dict[str, float]) -> None:
    """Writes figures to the run that trained the model."""
    if names := record.names(model, path):
        assert model.directory
        where = f"eval/{next(iter(names))}/{name}/step-{model.step}"
        record.write(
            model.directory, {f"{where}/{metric}": value for metric, value in metrics.items()}, data=names
        )

"""Evaluations of models of images and texts: by the names of classes, and by captions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from orchestrator.errors import UsageError
from orchestrator.evaluation.base import EvaluationConfig, EvaluationRequest, EvaluationResult, setting
from orchestrator.evaluation.kinds.scores import POINT, show_classes

if TYPE_CHECKING:
    from orchestrator.checkpoint.models import ModelRef

KS = (1, 5, 10)
MOST_PIXELS = 2e8  # values of the images that others are compared with by their pixels: 0.8 GB


@dataclass(frozen=True, kw_only=True)
class ZeroShotConfig(EvaluationConfig):
    """classification by the names of classes, of a model that reads text: see docs/texts.md

    evaluate lit --zero-shot flowers.toml --data /data/flowers
    """

    kind: Literal["zero_shot"] = "zero_shot"
    zero_shot: str = setting(
        help="classify by names: a TOML file with classes, by label, and templates", metavar="FILE"
    )
    set: tuple[str, ...] = setting((), POINT, metavar="FIELD=VALUE", nargs="+")
    per_class: bool = setting(False, "print the table by class")

    def evaluate(self, on: EvaluationRequest) -> Iterator[EvaluationResult]:
        """Classifies by the names and templates of a file, model by model."""
        from orchestrator.data.manifest import open_manifest
        from orchestrator.evaluation.evaluate import images_of
        from orchestrator.evaluation.points import parse_point
        from wings.image_text.evaluation import nearest_pixels, read_class_names, zero_shot_scores

        point, names, reports = parse_point(self.set), read_class_names(self.zero_shot), []
        other = "train" if on.split == "val" else "val"
        for model in with_text(on.models):
            model = model.in_groups(point.images_per_group)
            path = on.path(model)
            here = names.for_data(path)
            read = partial(images_of, model, path=path, split=on.split, batch_size=on.batch_size, fields={})
            find = partial(zero_shot_scores, names=here, point=point)
            scores = on.measure(model, lambda loaded, read=read, find=find: find(loaded, read()))
            found, pixels = {name: each.metrics() for name, each in scores.items()}, None
            if open_manifest(path).rows(other) * 3 * model.run.model.image_side() ** 2 <= MOST_PIXELS:
                pixels = nearest_pixels(on.images(model, path, {}, other), on.images(model, path, {}))
            report = about(model, path, on) | {
                "images": scores["all"].images(),
                "unread": scores["all"].unread,
                "metrics": {name: found["all"][name] for name in ("acc1", "acc5")},
                "baselines": {"chance": 1 / len(here.classes), "nearest_pixels": pixels},
                "templates": {name: each["acc1"] for name, each in found.items() if name != "all"},
                "classes": scores["all"].table(here.classes),
            }
            reports.append(report)
            yield EvaluationResult(model=model, paths=(path,), metrics=report["metrics"], report=report)
        first = reports[0]
        rows = [(r["model"], r["images"], r["metrics"]["acc1"], r["metrics"]["acc5"]) for r in reports]
        rows += [(), ("chance", "", first["baselines"]["chance"], "")]
        if (pixels := first["baselines"]["nearest_pixels"]) is not None:
            rows.append((f"nearest image of {other} by pixels", "", pixels, ""))
        count = f"{len(names.classes)} classes x {len(names.templates)} templates of {self.zero_shot}"
        on.table(
            ("model", "images", "acc@1", "acc@5"), rows, title=f"{count}, on {first['data']}, {on.split}"
        )
        for report in reports:
            by_template = sorted(report["templates"].items(), key=lambda entry: -entry[1])
            if len(by_template) > 1:
                on.table(("template", "acc@1"), by_template, title=f"{report['model']} by template")
            if self.per_class:
                show_classes(report, on)


@dataclass(frozen=True, kw_only=True)
class RetrievalConfig(EvaluationConfig):
    """captions by images, and images by captions, of a model that reads text: see docs/texts.md

    evaluate lit --retrieval --data /data/captioned --page found.html
    """

    kind: Literal["retrieval"] = "retrieval"
    page: str | None = setting(None, "file or URI for a page of what is found", metavar="FILE")

    def evaluate(self, on: EvaluationRequest) -> Iterator[EvaluationResult]:
        """Finds captions by images and images by captions, model by model; the page is of the first."""
        from orchestrator import storage
        from orchestrator.evaluation.evaluate import images_of
        from wings.image_text.evaluation import CAPTIONS, embed_pairs
        from wings.image_text.retrieval import chance_recall, image_ranks, recalls, text_ranks
        from wings.image_text.retrieval_page import retrieval_page

        page, reports = self.page and on.writable("page", self.page), []
        for model in with_text(on.models):
            path = on.path(model)
            where = {"path": path, "split": on.split, "batch_size": on.batch_size, "fields": CAPTIONS}
            read = partial(images_of, model, **where)
            pairs = on.measure(model, lambda loaded, read=read: embed_pairs(loaded, read()))
            images, texts = len(pairs.image_ID), len(pairs.captions)
            metrics, chance = dict[str, float](), dict[str, float]()
            for name, ranks, candidates in (("i2t", image_ranks, texts), ("t2i", text_ranks, images)):
                found = ranks(pairs.image_ID, pairs.text_TD, pairs.image_T, pairs.words_T)
                metrics |= {
                    f"{name}_{measure}": value for measure, value in recalls(found.ranks_Q, KS).items()
                }
                chance |= {f"{name}_r{k}": chance_recall(found.right_Q, candidates, k) for k in KS}
            report = about(model, path, on) | {
                "images": images,
                "captions": texts,
                "distinct_captions": int(pairs.words_T.max()) + 1,
                "metrics": metrics,
                "baselines": {"chance": chance},
            }
            if page and not reports:
                summary = (
                    f"{model.name} on {path}, {on.split}: {images:,} images, {texts:,} captions; recall at 1"
                    f" {metrics['i2t_r1']:.3f} from image to captions, {metrics['t2i_r1']:.3f} from caption"
                    " to images"
                )
                html = retrieval_page("Retrieval", summary, pairs, on.images(model, path, {}))
                storage.write_bytes(page, html.encode())
            reports.append(report)
            yield EvaluationResult(model=model, paths=(path,), metrics=metrics, report=report)
        first = reports[0]
        measures = (*(f"r{k}" for k in KS), "median_rank")
        columns = [f"{name}_{measure}" for name in ("i2t", "t2i") for measure in measures]
        rows: list[Sequence[Any]] = [(r["model"], *(r["metrics"][name] for name in columns)) for r in reports]
        rows += [(), ("chance", *(first["baselines"]["chance"].get(name, "") for name in columns))]
        counts = (
            f"{first['images']:,} images, {first['captions']:,} captions, {first['distinct_captions']:,}"
            " distinct"
        )
        on.table(("model", *columns), rows, title=f"{counts}, of {first['data']}, {on.split}")
        on.say(
            "i2t: images with one of their captions among the first k; equal scores of wrong answers are"
            " ahead"
        )
        if page:
            on.say(f"page     {page}")


def with_text(models: Sequence[ModelRef]) -> Sequence[ModelRef]:
    """Returns the models, all of which read text. Raises UsageError if one does not."""
    from wings.image_text.contrastive import text_of

    for model in models:
        try:
            text_of(model.run.model).tokenizer.check_known()
        except ValueError as error:
            raise UsageError(f"{model.name}: {error}") from None
    return models


def about(model: ModelRef, path: str, on: EvaluationRequest) -> dict[str, Any]:
    """Returns what a report begins with."""
    return {"model": model.name, "run": model.directory, "data": path, "split": on.split}

"""A page of what a model finds: for some images the captions with the largest cosines, and the reverse."""

import base64
from collections.abc import Iterable
from html import escape

import torch

from orchestrator.data.batch import Batch
from orchestrator.data.images import encode_png
from orchestrator.evaluation.image_text import EmbeddedPairs

QUERIES, SHOWN = 12, 5
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem;
  color: light-dark(#222, #ddd); background: light-dark(#fff, #181818); color-scheme: light dark; }
table { border-collapse: collapse; width: 100%; }
td { padding: .4rem .6rem; vertical-align: middle; border-top: 1px solid #8884; }
img { width: 72px; height: 72px; object-fit: contain; image-rendering: auto; border-radius: 4px; }
.right { outline: 3px solid #2a9d57; outline-offset: 1px; }
span.right { outline: none; color: light-dark(#1b7a41, #5fd38d); font-weight: 600; }
ol { margin: 0; padding-left: 1.2rem; }
"""


def retrieval_page(title: str, summary: str, pairs: EmbeddedPairs, batches: Iterable[Batch]) -> str:
    """Returns HTML with images as the model sees them; `batches` are those that `pairs` were made of.

    Queries are spread evenly over the split. Right answers are marked.
    """
    images, texts = len(pairs.image_ID), len(pairs.captions)
    asked_images = torch.linspace(0, images - 1, min(QUERIES, images)).long()
    asked_texts = torch.linspace(0, texts - 1, min(QUERIES, texts)).long()
    captions = (pairs.image_ID[asked_images] @ pairs.text_TD.T).topk(min(SHOWN, texts)).indices
    found = (pairs.text_TD[asked_texts] @ pairs.image_ID.T).topk(min(SHOWN, images)).indices
    shown = _pictures({*asked_images.tolist(), *found.flatten().tolist()}, pairs, batches)
    owner = pairs.image_T.tolist()
    rows = []
    for image, best in zip(asked_images.tolist(), captions.tolist(), strict=True):
        items = "".join(
            f"<li>{_marked(escape(pairs.captions[text]), owner[text] == image)}</li>" for text in best
        )
        rows.append(f"<tr><td>{_picture(shown[image], False)}</td><td><ol>{items}</ol></td></tr>")
    to_images = [
        f"<tr><td>{escape(pairs.captions[text])}</td><td>"
        + " ".join(_picture(shown[image], owner[text] == image) for image in best)
        + "</td></tr>"
        for text, best in zip(asked_texts.tolist(), found.tolist(), strict=True)
    ]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style><h1>{escape(title)}</h1><p>{escape(summary)}</p>"
        f"<h2>Captions of images</h2><table>{''.join(rows)}</table>"
        f"<h2>Images of captions</h2><table>{''.join(to_images)}</table></html>"
    )


def _pictures(wanted: set[int], pairs: EmbeddedPairs, batches: Iterable[Batch]) -> dict[int, str]:
    """Returns number of an image -> its PNG in base64."""
    number = {key: i for i, key in enumerate(pairs.keys) if i in wanted}
    return {
        number[key]: base64.b64encode(encode_png(image.permute(1, 2, 0).cpu().numpy())).decode()
        for batch in batches
        for key, image in zip(batch.key.tolist(), batch["image"], strict=True)
        if key in number
    }


def _picture(png: str, right: bool) -> str:
    return f'<img alt="" src="data:image/png;base64,{png}"{" class=right" if right else ""}>'


def _marked(text: str, right: bool) -> str:
    return f"<span class=right>{text}</span>" if right else text

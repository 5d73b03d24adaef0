"""A page of what a model finds: for some images the captions with the largest cosines, and the reverse."""

import base64
from collections.abc import Iterable
from html import escape

import torch

from orchestrator.data.batch import Batch
from orchestrator.data.images import encode_png
from wings.image_text.evaluation import EmbeddedPairs

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
    words, owner = pairs.words_T.tolist(), pairs.image_T.tolist()
    # A caption that several images have is shown once.
    distinct = [words.index(number) for number in range(max(words) + 1)]
    own: dict[int, set[int]] = {}
    for number, image in zip(words, owner, strict=True):
        own.setdefault(image, set()).add(number)
    images, texts = len(pairs.image_ID), len(distinct)
    asked_images = torch.linspace(0, images - 1, min(QUERIES, images)).long()
    asked_texts = torch.linspace(0, texts - 1, min(QUERIES, texts)).long()
    text_WD = pairs.text_TD[distinct]
    captions = (pairs.image_ID[asked_images] @ text_WD.T).topk(min(SHOWN, texts)).indices
    found = (text_WD[asked_texts] @ pairs.image_ID.T).topk(min(SHOWN, images)).indices
    shown = _pictures({*asked_images.tolist(), *found.flatten().tolist()}, pairs, batches)
    rows, to_images = [], []
    for image, best in zip(asked_images.tolist(), captions.tolist(), strict=True):
        items = [_marked(escape(pairs.captions[distinct[w]]), w in own.get(image, ())) for w in best]
        listed = "".join(f"<li>{item}</li>" for item in items)
        rows.append(f"<tr><td>{_picture(shown[image], False)}</td><td><ol>{listed}</ol></td></tr>")
    for number, best in zip(asked_texts.tolist(), found.tolist(), strict=True):
        pictures = " ".join(_picture(shown[image], number in own.get(image, ())) for image in best)
        caption = escape(pairs.captions[distinct[number]])
        to_images.append(f"<tr><td>{caption}</td><td>{pictures}</td></tr>")
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

"""Classification by texts that name the classes, with a model that compares images and texts.

Source: CLIP (Radford et al. 2021, section 3.1), as big_vision computes it: all texts that name a class, of
length 1, are averaged, and the mean has length 1 again. Of a name, the part before a comma is used.

Dimensions: C classes, T texts, D the size of an embedding, B images.
"""

import warnings
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from moe.model import Model, Output
from moe.overrides import AS_TRAINED, RoutingOverrides
from wings.image_text.two_towers import ImageText

TEXTS = 256  # that are embedded at a time


def unit(z: Tensor) -> Tensor:
    """Returns vectors of length 1, as big_vision and vmoe: z / (|z| + 1e-8)."""
    return z / (z.norm(dim=-1, keepdim=True) + 1e-8)


def class_weights(embedded_TD: Tensor, class_T: Tensor, num_classes: int) -> Tensor:
    """Returns (C, D): the mean of the units of each class's texts, of length 1."""
    sums_CD = embedded_TD.new_zeros(num_classes, embedded_TD.shape[1])
    return unit(sums_CD.index_add(0, class_T, unit(embedded_TD)) / class_T.bincount()[:, None])


@torch.no_grad()
def embed_classes(model: Model, classes: Sequence[str], templates: Sequence[str]) -> Tensor:
    """Returns `class_weights` of each class's name in each template, by the model's text tower.

    Warns of classes that it cannot tell apart, because their names are cut or of unknown words.
    """
    text, device = model.config.text, next(model.parameters()).device  # pyright: ignore[reportAttributeAccessIssue]
    names = [name.partition(",")[0] for name in classes]
    texts = [template.replace("{}", name) for name in names for template in templates]
    encoded = text.tokenizer.encode(texts, text.length)
    same = Counter(tuple(ids) for ids in encoded.view(len(names), -1).tolist())
    if count := sum(times for times in same.values() if times > 1):
        warnings.warn(
            f"{count} of {len(classes)} classes have the same tokens as another: their words are unknown, or"
            f" lie beyond the {text.length} tokens of a text",
            stacklevel=2,
        )
    tokens = encoded.to(device)
    embedded = torch.cat([model(ImageText(None, part)).heads["text"] for part in tokens.split(TEXTS)])
    class_T = torch.arange(len(classes), device=device).repeat_interleave(len(templates))
    return class_weights(embedded, class_T, len(classes))


def check_names(classes: Sequence[str], templates: Sequence[str]) -> None:
    """Raises ValueError if the names or the templates cannot tell classes apart."""
    if not templates:
        raise ValueError("there must be a template, as 'a photo of a {}'")
    if wrong := [template for template in templates if "{}" not in template]:
        raise ValueError(f"a template has {{}} in the place of a class's name, got {wrong[0]!r}")
    if equal := [name for name in classes if classes.count(name) > 1]:
        raise ValueError(f"two classes are called {equal[0]!r}: no text can tell them apart")


class ZeroShot(torch.nn.Module):
    """A classifier of a model that compares images and texts: its classes are those that are named.

    Raises ValueError if names or templates cannot tell classes apart.
    """

    def __init__(self, model: Model, classes: Sequence[str], templates: Sequence[str]) -> None:
        check_names(classes, templates)
        super().__init__()
        self.model, self.config = model, model.config
        self.classes_CD: Tensor
        self.register_buffer("classes_CD", embed_classes(model, classes, templates))

    def forward(
        self,
        images: Tensor,
        valid_B: Tensor | None = None,
        routing_overrides: RoutingOverrides = AS_TRAINED,
    ) -> Output:
        """Returns ``logits`` (B, C): the factor times the cosines of (B, 3, H, W) images in -1..1."""
        output = self.model(images, valid_B, routing_overrides=routing_overrides)
        scale_B1 = output.heads["scale"][:, :1].exp()
        return output._replace(heads={"logits": scale_B1 * (unit(output.heads["image"]) @ self.classes_CD.T)})

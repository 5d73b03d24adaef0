"""The image tower and the text tower of big_vision, as SigLIP and LiT are published, in one model.

Source: big_vision, models/proj/image_text/two_towers.py and text_transformer.py. Their texts are tokenized by
SentencePiece, whose vocabulary is not in the weights: the model embeds tokens, and no words.
"""

import re
from collections.abc import Mapping
from dataclasses import replace

import torch

from orchestrator.errors import UsageError
from wings.image_text.text_tower import TextConfig
from wings.image_text.two_towers import TwoTowersConfig
from wings.weights.copies import TRAINING
from wings.weights.flax import heads_of, in_torch, names_of, unstacked
from wings.weights.kind import Facts
from wings.weights.mapping import ImportPlan, Planner
from wings.weights.tensors import Lazy, combine, zero_tensor

IMAGE, TEXT, BODY = "img/", "txt/", "Encoder_0/"
ASSUMED = "the text tower pools the last token, as SigLIP's and LiT's do: weights do not say it"


def split_towers(tensors: Mapping[str, Lazy]) -> tuple[dict[str, Lazy], dict[str, Lazy], list[str]]:
    """Returns the tensors of the image tower by their names in it, all others of the two towers, and notes.

    Raises:
        UsageError: if there are no two towers as big_vision has them.
    """
    found = {m[1] for name in tensors if (m := re.fullmatch(rf"((?:.*/)?){IMAGE}embedding/kernel", name))}
    parents = [parent for parent in found if not any(map(TRAINING.match, parent.split("/")))]
    if len(parents) != 1:
        raise UsageError("there are no two towers as big_vision has them, with img/, txt/, t and b")
    (parent,) = parents
    inside = {name.removeprefix(parent): t for name, t in tensors.items() if name.startswith(parent)}
    image = {name.removeprefix(IMAGE): t for name, t in inside.items() if name.startswith(IMAGE)}
    # Without a parent an optimiser and counters are among them.
    others = {
        name: t
        for name, t in inside.items()
        if name.startswith(TEXT) or name in ("t", "b") or (parent and not name.startswith(IMAGE))
    }
    beside = len(tensors) - len(image) - len(others)
    return image, others, [f"left out beside the towers: {beside} tensors"] if beside else []


def plan_towers(image: ImportPlan, others: Mapping[str, Lazy], facts: Facts) -> ImportPlan:
    """Plans the model of two towers around that of images, from what `split_towers` returns.

    Raises:
        UsageError: if a tensor is missing, left over or of a wrong shape.
    """
    text, tensors = _text({n.removeprefix(TEXT): t for n, t in others.items() if n.startswith(TEXT)}, facts)
    rest = {name: t for name, t in others.items() if not name.startswith(TEXT)}
    if "t" not in rest or {*rest} - {"t", "b"}:
        raise UsageError(f"beside the towers are {', '.join(rest) or 'no tensors'}, and not t and b alone")
    made = {f"image.{name}": how for name, how in image.made.items() if name != "head"}
    ours = {f"image.{n}": t for n, t in image.tensors.items() if not n.startswith("head.")}
    embeds = "head" not in image.made
    if embeds:
        ours |= {f"project_image.{part}": image.tensors[f"head.{part}"] for part in ("weight", "bias")}
    if "b" not in rest:
        made["temperature.bias_1"] = "zero, as it has none: the loss was a softmax"
    temperature = {"log_scale_1": rest["t"], "bias_1": rest.get("b") or zero_tensor(1)}
    ours |= {f"temperature.{name}": t.map("", torch.flatten) for name, t in temperature.items()}
    embedded, features = tensors["head.weight"].shape[0], image.tensors["head.weight"].shape
    if embedded != (features[0] if embeds else features[1]):
        raise UsageError(
            f"texts are embedded in {embedded} numbers, and images in {features[0 if embeds else 1]}"
        )
    ours |= {f"project_text.{part}": tensors.pop(f"head.{part}") for part in ("weight", "bias")}
    config = TwoTowersConfig(
        image=replace(image.vit, num_classes=1), text=text, embed_dim=embedded if embeds else None
    )
    ours |= {f"text.{name}": lazy for name, lazy in tensors.items()}
    return ImportPlan(config=config, tensors=ours, left_out=image.left_out, made=made)


def _text(raw: Mapping[str, Lazy], facts: Facts) -> tuple[TextConfig, dict[str, Lazy]]:
    """Returns the config of the text tower and its tensors, among them those of ``head``."""
    stacked = unstacked(raw)
    theirs, names = in_torch(stacked), names_of(stacked, BODY, old=False)
    planner = Planner(theirs, names, replace(facts, heads=heads_of(stacked)), None)
    embed, position = planner.tensor("Embed_0/embedding"), planner.tensor("pos_embedding")
    if again := theirs.get(f"{BODY}pos_embedding"):  # a mistake of old checkpoints, which added both
        position = combine("both positions added", lambda pair: pair[0] + pair[1], [position, again])
    planner.ours |= {"embed_VD": embed, "position_LD": position.map("", lambda t: t.flatten(0, -2))}
    depth = planner.blocks()
    if any(planner.block(i) for i in range(depth)):
        raise UsageError("experts in the text tower: none was published, and their routing is not known")
    planner.check_blocks()
    planner.linear("norm", names.norm, needs_bias=True)
    has_probe = names.probe in theirs
    if has_probe:
        planner.ours["pool.probe_D"] = planner.tensor(names.probe).map("", torch.flatten)
        planner.attention_pooling()
    planner.linear("head", names.head, needs_bias=True)
    planner.check_all_used()
    try:
        config = TextConfig(
            vocabulary=embed.shape[0],
            length=planner.ours["position_LD"].shape[0],
            width=embed.shape[1],
            depth=depth,
            heads=planner.heads or 1,
            mlp_dim=planner.ours["blocks.0.mlp.up.weight"].shape[0],
            pooling="map" if has_probe else "last",
            qk_norm="blocks.0.attention.norm_q.weight" in planner.ours,
        )
    except ValueError as error:
        raise UsageError(f"the text tower fits none of ours: {error}") from None
    return config, planner.ours

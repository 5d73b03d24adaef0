"""Two towers in big_vision's names, against the arithmetic of its text tower in numpy."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moe.exported import load
from orchestrator.errors import UsageError
from wings.image_text.two_towers import ImageText
from wings.image_text.zero_shot import embed_classes
from wings.weights import plan_import, write_import

GOLDENS = Path(__file__).parents[2] / "goldens" / "weights"
BOTH = {"model.kind": "two_towers"}
VOCABULARY, LENGTH, WIDTH, HEADS, HIDDEN, DEPTH = 50, 6, 24, 3, 40, 2
Tree = dict[str, Any]


def text_tower(rng: np.random.Generator, out: int, *, probe: bool = False) -> Tree:
    """Random weights by their names below ``txt/``; nothing is zero or one."""

    def some(*shape: int) -> np.ndarray:
        return rng.normal(0, 0.3, shape).astype(np.float32)

    def linear(name: str, kernel: tuple[int, ...], bias: tuple[int, ...]) -> Tree:
        return {f"{name}/kernel": some(*kernel), f"{name}/bias": some(*bias)}

    def norm(name: str) -> Tree:
        return {f"{name}/scale": 1 + some(WIDTH), f"{name}/bias": some(WIDTH)}

    def attention(name: str) -> Tree:
        each = WIDTH // HEADS
        found = linear(f"{name}/out", (HEADS, each, WIDTH), (WIDTH,))
        for part in ("query", "key", "value"):
            found |= linear(f"{name}/{part}", (WIDTH, HEADS, each), (HEADS, each))
        return found

    def mlp(name: str) -> Tree:
        down = linear(f"{name}/Dense_1", (HIDDEN, WIDTH), (WIDTH,))
        return linear(f"{name}/Dense_0", (WIDTH, HIDDEN), (HIDDEN,)) | down

    tree = {"Embed_0/embedding": some(VOCABULARY, WIDTH), "pos_embedding": some(1, LENGTH, WIDTH)}
    for i in range(DEPTH):
        block = f"Encoder_0/encoderblock_{i}"
        tree |= norm(f"{block}/LayerNorm_0") | attention(f"{block}/MultiHeadDotProductAttention_0")
        tree |= norm(f"{block}/LayerNorm_1") | mlp(f"{block}/MlpBlock_0")
    if probe:
        tree |= {"MAPHead_0/probe": some(1, 1, WIDTH)} | norm("MAPHead_0/LayerNorm_0")
        tree |= attention("MAPHead_0/MultiHeadDotProductAttention_0") | mlp("MAPHead_0/MlpBlock_0")
    return tree | norm("Encoder_0/encoder_norm") | linear("head", (WIDTH, out), (out,))


def embedded(tree: Tree, tokens_L: list[int]) -> np.ndarray:
    """The embedding of one text, in float64, token by token and head by head."""
    p = {name: array.astype(np.float64) for name, array in tree.items()}

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
        return scaled * p[f"{name}/scale"] + p[f"{name}/bias"]

    def mlp(x: np.ndarray, name: str) -> np.ndarray:
        h = x @ p[f"{name}/Dense_0/kernel"] + p[f"{name}/Dense_0/bias"]
        h = 0.5 * h * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))
        return h @ p[f"{name}/Dense_1/kernel"] + p[f"{name}/Dense_1/bias"]

    def attention(asking: np.ndarray, x: np.ndarray, name: str) -> np.ndarray:
        total = np.zeros((len(asking), WIDTH)) + p[f"{name}/out/bias"]
        for h in range(HEADS):
            q, k, v = (
                of @ p[f"{name}/{part}/kernel"][:, h] + p[f"{name}/{part}/bias"][h]
                for part, of in (("query", asking), ("key", x), ("value", x))
            )
            for i in range(len(asking)):
                weight = np.exp(q[i] @ k.T / np.sqrt(WIDTH // HEADS))
                total[i] += (weight / weight.sum()) @ v @ p[f"{name}/out/kernel"][h]
        return total

    x = p["Embed_0/embedding"][tokens_L] + p["pos_embedding"][0]
    for i in range(DEPTH):
        block = f"Encoder_0/encoderblock_{i}"
        y = norm(x, f"{block}/LayerNorm_0")
        x = x + attention(y, y, f"{block}/MultiHeadDotProductAttention_0")
        x = x + mlp(norm(x, f"{block}/LayerNorm_1"), f"{block}/MlpBlock_0")
    x = norm(x, "Encoder_0/encoder_norm")
    last = x[-1]
    if "MAPHead_0/probe" in p:
        y = attention(p["MAPHead_0/probe"][0], x, "MAPHead_0/MultiHeadDotProductAttention_0")
        last = (y + mlp(norm(y, "MAPHead_0/LayerNorm_0"), "MAPHead_0/MlpBlock_0"))[0]
    return last @ p["head/kernel"] + p["head/bias"]


def image_tower(*, head: bool) -> Tree:
    with np.load(GOLDENS / "big_vision_map.npz") as file:
        arrays = {name.removeprefix("params/"): file[name] for name in file.files}
    return arrays if head else {name: a for name, a in arrays.items() if not name.startswith("head/")}


def saved(path: Path, image: Tree, text: Tree, beside: Tree, parent: str = "params/") -> str:
    tree = {f"img/{n}": a for n, a in image.items()} | {f"txt/{n}": a for n, a in text.items()} | beside
    np.savez(path, **{f"{parent}{name}": array for name, array in tree.items()}, step=np.int64(7))
    return str(path)


T, B = {"t": np.array([2.25], np.float32)}, {"b": np.array([-12.5], np.float32)}


@pytest.mark.parametrize(
    ("parent", "head", "probe", "scan", "twice"),
    [
        ("params/", False, False, False, False),  # SigLIP
        ("", False, False, True, True),
        ("params/", True, True, False, False),  # LiT, and another pooling
    ],
)
def test_both_towers(parent: str, head: bool, probe: bool, scan: bool, twice: bool, tmp_path: Path) -> None:
    rng, image = np.random.default_rng(0), image_tower(head=head)
    features = image["head/bias"].shape[0] if head else image["Transformer/encoder_norm/bias"].shape[0]
    text, beside = text_tower(rng, features, probe=probe), T | ({} if head else B)
    expected = [embedded(text, tokens) for tokens in ([3, 1, 4, 1, 5, 9], [49, 2, 2, 1, 1, 1])]
    stored = dict(text)
    if scan:
        names = {n.partition("encoderblock_0/")[2] for n in text if "encoderblock_0/" in n}
        stored = {n: a for n, a in text.items() if "encoderblock_" not in n}
        for name in names:
            each = [text[f"Encoder_0/encoderblock_{i}/{name}"] for i in range(DEPTH)]
            stored[f"Encoder_0/encoderblock/{name}"] = np.stack(each)
    if twice:
        half = stored["pos_embedding"] / 2
        stored |= {"pos_embedding": half, "Encoder_0/pos_embedding": half}
    source = saved(tmp_path / "both.npz", image, stored, beside, parent)
    planned = plan_import(source, name="both", changes=BOTH)
    assert f"text tower: width {WIDTH}, {DEPTH} blocks, {HEADS} heads, {LENGTH} of {VOCABULARY}" in str(
        planned
    )
    write_import(planned, str(tmp_path / "out"))
    model: Any = load(tmp_path / "out")
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9], [49, 2, 2, 1, 1, 1]])
    pixels = torch.rand(2, 3, *2 * (model.config.image_side(),)) * 2 - 1
    heads = model(ImageText(pixels, tokens)).heads
    torch.testing.assert_close(heads["text"].double(), torch.tensor(np.array(expected)), rtol=1e-5, atol=1e-5)
    write_import(plan_import(source, name="image"), str(tmp_path / "image"))
    alone: Any = load(tmp_path / "image")
    assert torch.equal(heads["image"], alone(pixels).logits if head else alone.features(pixels))
    assert heads["scale"][0].tolist() == [2.25, 0 if head else -12.5]
    task: Any = planned.run.task
    assert (task.kind, task.loss) == ("contrastive", "softmax" if head else "sigmoid")
    with pytest.raises(ValueError, match="its tokenizer knows no words"):
        embed_classes(model, ["cat", "dog"], ["a photo of a {}"])


def test_what_is_no_pair_of_towers(tmp_path: Path) -> None:
    image, features = image_tower(head=False), 32
    text = text_tower(np.random.default_rng(0), image["Transformer/encoder_norm/bias"].shape[0])
    without = {n: a for n, a in text.items() if not n.startswith("head/")}
    narrow = text_tower(np.random.default_rng(0), features + 1)
    for name, tree, beside, said in (
        ("t", text, B, "beside the towers are b, and not t and b alone"),
        ("more", text, T | B | {"scale": T["t"]}, "beside the towers are t, b, scale"),
        ("headless", without, T | B, "there is no tensor head.*weight"),
        ("narrow", narrow, T | B, f"texts are embedded in {features + 1} numbers, and images in"),
        ("left", text | {"Encoder_0/extra": T["t"]}, T | B, "no place for Encoder_0/extra"),
    ):
        with pytest.raises(UsageError, match=said):
            plan_import(saved(tmp_path / f"{name}.npz", image, tree, beside), name="x", changes=BOTH)
    with pytest.raises(UsageError, match="there are no two towers as big_vision has them"):
        plan_import(str(GOLDENS / "big_vision_map.npz"), name="x", changes=BOTH)


def test_another_size_of_images(tmp_path: Path) -> None:
    """Changes are those of the model of two towers; positions of the image tower are resized."""
    image = image_tower(head=False)
    text = text_tower(np.random.default_rng(0), image["Transformer/encoder_norm/bias"].shape[0])
    source = saved(tmp_path / "both.npz", image, text, T | B)
    size = 2 * plan_import(source, name="x").run.model.image_side()
    both = plan_import(source, name="x", changes=BOTH | {"model.image.image_size": size})
    alone = plan_import(source, name="x", changes={"model.image_size": size})
    assert both.resized == alone.resized is not None
    found = both.plan.tensors["image.position_SD"].read()
    assert torch.equal(found, alone.plan.tensors["position_SD"].read())

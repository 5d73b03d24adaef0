"""Size and outputs of ONNX graphs in float16 and int8, made and run by onnxruntime on a CPU.

python bench/graphs.py          # two minutes; writes the file and the table of docs/weights.md
python bench/graphs.py --page   # writes the table from the file
"""

import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnxruntime.quantization import quantize_dynamic
from onnxruntime.quantization.shape_inference import quant_pre_process
from onnxruntime.transformers.float16 import DEFAULT_OP_BLOCK_LIST, convert_float_to_float16

from bench.harness import RESULTS, ROOT, options, with_block
from bench.provenance import provenance
from moe.layer import MoEConfig
from moe.models.vit import ViTConfig
from moe.routing import RouterConfig
from moe.signature import Signature
from orchestrator.checkpoint.graphs import write_onnx

PAGE = ROOT / "docs/weights.md"
SIZE, IMAGES = 64, 64
ROUTERS = (None, "soft", "token_choice", "expert_choice", "top_k")


def main() -> None:
    args = options(__doc__, page=False, out=str(RESULTS / "graphs.json"))
    if not args.page:
        result = provenance("onnx", "onnxruntime", "torch")
        result["graphs"] = {kind or "dense": measured(kind) for kind in ROUTERS}
        Path(args.out).write_text(json.dumps(result, indent=1) + "\n")
    PAGE.write_text(with_block(PAGE.read_text(), "graphs", table(json.loads(Path(args.out).read_text()))))


def to_float16(source: str, out: str) -> None:
    """ScatterND, which adds up what experts return, has no float16 on CPUs."""
    kept = [*DEFAULT_OP_BLOCK_LIST, "ScatterND"]
    onnx.save(convert_float_to_float16(onnx.load(source), keep_io_types=True, op_block_list=kept), out)


def to_int8(source: str, out: str) -> None:
    quant_pre_process(source, f"{out}.prepared", skip_symbolic_shape=True)
    quantize_dynamic(f"{out}.prepared", out)


FORMS: dict[str, Callable[[str, str], None]] = {"float16": to_float16, "int8": to_int8}


def measured(kind: str | None) -> dict[str, dict[str, float]]:
    """Returns megabytes, the largest difference as a share of the largest output, and the share of images
    whose largest output is the same, of a model of random weights.
    """
    router: Any = RouterConfig.kinds[kind]() if kind else None
    moe = MoEConfig(num_experts=8, router=router) if kind else None
    fields: dict[str, Any] = {"image_size": SIZE, "patch_size": 16, "width": 192, "depth": 4, "heads": 3}
    model = ViTConfig(**fields, mlp_dim=768, num_classes=100, moe=moe).build(seed=0).eval()
    torch.nn.init.normal_(model.head.weight, std=0.1)  # pyright: ignore[reportArgumentType]
    images = np.random.default_rng(0).uniform(-1, 1, (IMAGES, 3, SIZE, SIZE)).astype("float32")
    found = {}
    with TemporaryDirectory() as folder:
        whole = f"{folder}/float32.onnx"
        write_onnx(model, whole, Signature(image_size=SIZE))
        wanted = outputs(whole, images)
        for name in ("float32", *FORMS):
            path = f"{folder}/{name}.onnx"
            if name in FORMS:
                FORMS[name](whole, path)
            given = outputs(path, images)
            found[name] = {
                "MB": Path(path).stat().st_size / 1e6,
                "difference": float(np.abs(given - wanted).max() / np.abs(wanted).max()),
                "same class": float((given.argmax(1) == wanted.argmax(1)).mean()),
            }
    return found


def outputs(path: str, images: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(["logits"], {"images": images})[0])


def table(result: dict[str, Any]) -> str:
    lines = ["| model | MB | float16: MB | difference | int8: MB | difference | same class |"]
    lines.append("|---|--:|--:|--:|--:|--:|--:|")
    for name, forms in result["graphs"].items():
        half, byte = forms["float16"], forms["int8"]
        cells = (
            *(f"{forms['float32']['MB']:.1f}", f"{half['MB']:.1f}", f"{half['difference']:.1e}"),
            *(f"{byte['MB']:.1f}", f"{byte['difference']:.1%}", f"{byte['same class']:.0%}"),
        )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

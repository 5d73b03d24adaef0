"""Answers pictures by the file model.onnx beside this one, and nothing of the project that made it.

python read.py PICTURE ..    needs numpy, onnxruntime and Pillow
"""

import io
import json
import math
import sys
from pathlib import Path

import numpy as np
import onnxruntime
from PIL import Image, ImageOps

session = onnxruntime.InferenceSession(Path(__file__).with_name("model.onnx"))
signature = json.loads(session.get_modelmeta().custom_metadata_map["signature"])


def model_input(encoded: bytes) -> np.ndarray:
    """Returns (1, 3, image_size, image_size) float32."""
    image, size = ImageOps.exif_transpose(Image.open(io.BytesIO(encoded))), signature["image_size"]
    if image.mode.startswith("I;16"):  # of colours Pillow reads the high bytes alone
        grey = np.asarray(image).astype(float)
        grey = grey * 255 / signature["white"] if signature["white"] else grey // 256
        image = Image.fromarray(np.clip(np.round(grey), 0, 255).astype("uint8"))
    if signature["background"] and image.has_transparency_data:
        under = Image.new("RGBA", image.size, signature["background"])
        image = Image.alpha_composite(under, image.convert("RGBA"))
    image = image.convert("RGB")
    how, shorter = Image.Resampling[signature["interpolation"].upper()], signature["resize"] == "shorter"
    if signature["pixels"] == "parts" and image.size != (size, size):
        sides = [min(image.size)] * 2 if shorter else image.size
        width, height = (max(1, round(side * signature["crop"])) for side in sides)
        left, top = (image.width - width) // 2, (image.height - height) // 2
        image = image.crop((left, top, left + width, top + height)).resize((size, size), how)
    elif signature["pixels"] in ("timm", "transformers") or image.size != (size, size):
        whole, theirs = size / signature["crop"], signature["pixels"] == "transformers"
        short = round(whole) if theirs else math.floor(whole)
        width, height = (int(short * s / min(image.size)) if shorter else short for s in image.size)
        left, top = ((int if theirs else round)((s - size) / 2) for s in (width, height))
        image = image.resize((width, height), how).crop((left, top, left + size, top + size))
    pixels = (np.asarray(image) / 255 - signature["mean"]) / signature["std"]
    return pixels.transpose(2, 0, 1)[None].astype("float32")


def probabilities(encoded: bytes) -> np.ndarray:
    """Returns the probability of each of signature["classes"]."""
    (logits,) = np.asarray(session.run(["logits"], {"images": model_input(encoded)})[0])
    odds = np.exp(logits - (logits.max() if signature["output"] == "softmax" else 0))
    return odds / (odds.sum() if signature["output"] == "softmax" else 1 + odds)


if __name__ == "__main__":
    if not sys.argv[1:]:
        sys.exit(__doc__)
    unread = 0
    for path in sys.argv[1:]:
        try:
            found = probabilities(Path(path).read_bytes())
        except OSError as error:  # Pillow's too
            print(f"error: {path}: {error}", file=sys.stderr)
            unread += 1
            continue
        best = int(found.argmax())
        names = signature["classes"] or range(len(found))
        print(f"{path}\t{names[best]}\t{found[best]:.4f}")
    sys.exit(bool(unread))

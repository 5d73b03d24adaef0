"""For every field of the wings' configs: another value, and what then differs."""

from tests.orchestrator.option_cases import ALL, BOTH, SIZES, TINY, Case, Place, below

WORDS = "\n".join(["a", "digit", "photo", "small", "the", "two"])
TEXT = {"tokenizer.kind": "words", "tokenizer.vocabulary": WORDS, "vocabulary": 40, "length": 6, **SIZES}
TOWERS = (
    TINY
    | {"model.kind": "two_towers", "model.image.kind": "vit", "task.kind": "contrastive"}
    | below("model.image", {"image_size": 8, "patch_size": 4, **SIZES})
    | below("model.text", TEXT)
)
PIECES = TOWERS | below("model.text", {"vocabulary": 600, "length": 12})
BPE = PIECES | below("model.text.tokenizer", {"kind": "bpe", "vocabulary": ""})
DECODER = TINY | below("model", {"kind": "decoder", "length": 12, **SIZES}) | {"task.kind": "next_token"}

MODELS = {
    "DecoderConfig": Place("model", BOTH, DECODER, {
        "length": 6,
        "width": 32,
        "depth": 3,
        "heads": Case(4, "steps"),
        "mlp_dim": 64,
        "qk_norm": Case(True, "steps"),
        "moe": {"num_experts": 4, "router.kind": "mixture"},
    }),
    "TwoTowersConfig": Place("model", "steps", TOWERS, {
        "image": Case({"width": 32}, BOTH, {"model.embed_dim": 8}),
        "text": Case({"width": 32}, BOTH, {"model.embed_dim": 8}),
        "embed_dim": Case(24, BOTH),
        "scale": 5.0,
        "bias": Case(-5.0, given={"task.loss": "sigmoid"}),
    }),
    "TextConfig": Place("model.text", "steps", TOWERS | {"model.embed_dim": 8}, {
        "tokenizer": Case({"vocabulary": "a\ndigit"}),
        "vocabulary": Case(50, "steps planned:disk"),
        "length": Case(4, BOTH),
        "width": Case(32, BOTH),
        "depth": Case(3, BOTH),
        "heads": 4,
        "mlp_dim": Case(64, BOTH),
        "attention": ALL,
        "pooling": ALL,
        "qk_norm": True,
        "moe": {"num_experts": 4},
    }),
    "WordsConfig": Place("model.text.tokenizer", "steps", PIECES, {"vocabulary": "a\ndigit"}),
    "BPEConfig": Place("model.text.tokenizer", "steps", BPE, {"vocabulary": "t h\nth e</w>"}),
}  # fmt: skip
TRAINING = {
    "ContrastiveConfig": Place("task", "steps", TOWERS, {
        "loss": ALL,
        "captions": 1,
        "equal_captions": ALL,
        "classes": Case(("zero", "two"), "steps:val steps:beside"),
        "templates": Case(("a small {}",), "steps:beside", {"task.classes": ("zero", "two")}),
    }),
    "NextTokenConfig": Place("task", "steps", DECODER, {}),
}  # fmt: skip

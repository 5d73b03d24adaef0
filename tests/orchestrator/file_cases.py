"""The cases of `option_cases` for what reads files, trains in a worker, or asks a cluster."""

from functools import cache
from pathlib import Path

from orchestrator.codec import override
from orchestrator.config import RunConfig
from tests.orchestrator.effects import data_set, trained
from tests.orchestrator.option_cases import ALL, SMALL, Case, Place, router

# augmentations without fields
PLAIN = {
    "Flip": "flip",
    "Shift": "shift",
    "Crop": "crop",
    "CropFlip": "crop_flip",
    "Inception": "inception",
    "ThreeAugment": "three_augment",
}


@cache
def in_files(root: Path) -> dict[str, Place]:
    """The places that read files: data, workers, and what they ask of a cluster."""
    files = SMALL | {"data.path": data_set(root), "storage": str(root / "runs")}
    files |= {"train.report_every": 1, "checkpoint.every": 100}
    looks = {"train.eval_every": 1}
    dense = trained(override(RunConfig(), files | {"name": "dense"}))
    starts = router("soft") | {"train.init_from": dense}
    trunk = trained(override(RunConfig(), files | {"name": "trunk"}))
    spread = router("soft") | {"scale.workers": 4, "data.batch_size": 16}
    return {
        "RunConfig": Place("", "place", files | {"storage": str(root / "place-a")}, {
            "name": "other",
            "storage": str(root / "place-b"),
            "model": Case({"width": 32}, "steps"),
            "task": Case({"loss": "sigmoid"}, "steps"),
            "data": Case({"batch_size": 16}, "steps"),
            "train": Case({"lr": 0.01}, "steps"),
            "checkpoint": Case({"every": 1}, "planned:disk"),
            "scale": Case({"use_gpu": True}, "requests:all"),
        }),
        "DataConfig": Place("data", "read:train", files, {
            "path": Case(data_set(root, 1), "read:train read:val"),
            "batch_size": 16,
            "lanes": Case(2, "read:order"),
            "shuffle_window": Case(4, "read:order"),
            "shuffle_run": Case(4, "read:order"),
            "tail": Case(ALL, "read:order"),
            "augment": ("inception",),
            "eval_resize": Case(ALL, "read:val"),
            "eval_crop": Case(0.5, "read:val"),
            "eval_interpolation": Case(ALL, "read:val"),
            "eval_pixels": Case(ALL, "read:val", {"data.eval_crop": 0.7}),
            "repeats": Case(2, "read:order"),
            "max_bad_frac": Case(0.5, "worker:error", {"data.path": data_set(root, broken=True)}),
            "cache_gb": Case(1e-6, "cache_of_a_node:bytes cache_of_a_node:whole", {"train.steps": 20}),
        }),
        **{
            f"{name}Config": Place(
                f"data.augment.{kind}", "read:train", files | {f"data.augment.{kind}": {}}, cases
            )
            for name, kind, cases in (
                ("RandAugment", "randaugment", {"operations": 4, "magnitude": 30}),
                ("ColorJitter", "color_jitter", {"strength": 0.9}),
                ("RandomErasing", "random_erasing", {"fraction": 1.0}),
                ("Mixup", "mixup", {"alpha": 0.5}),
                ("CutMix", "cutmix", {"alpha": 0.5}),
                *((name, kind, {}) for name, kind in PLAIN.items()),
            )
        },
        "TrainConfig": Place("train", "worker:weights", files, {
            "steps": Case(2, "worker:steps"),
            "lr": 0.01,
            "seed": Case(1, "worker:weights read:order", {"train.lr": 0.0}),
            "init_from": dense,
            "init_noise": Case(0.5, given=starts),
            "init_optimizer": Case(True, given=starts),
            "init_without": Case("head", given=starts),
            "freeze": ("head.",),
            "trunk": Case(trunk, "worker:steps worker:log", {"train.steps": 5}),
            "report_every": Case(2, "worker:steps"),
            "eval_every": Case(1, "worker:evaluated"),
            "stop_at": Case(0.0, "worker:steps", looks),
            "microbatch": Case(4, "steps:calls planned:memory"),
            "compute_dtype": Case("bfloat16", "worker:weights planned:memory"),
            "clip_norm": 0.1,
            "optimizer": {"kind": "sgd"},
            "schedule": Case({"timescale": 1}),
            "fewshot": Case({"shots": (1,)}, "worker:last"),
            "ema": Case({"decay": 0.5}, "worker:last planned:disk"),
        }),
        "FewShotConfig": Place("train.fewshot", "worker:last", files | {"train.fewshot": {"shots": (1, 2)}}, {
            "paths": (data_set(root, 1),),
            "shots": (1, 3),
            "seeds": 1,
        }),
        "EMAConfig": Place("train.ema", "worker:last", files | {"train.ema": {"decay": 0.9, "gamma": 0.1}}, {
            "decay": 0.1,
            "start": 1,
            "gamma": 5.0,
            "power": None,
        }),
        "CheckpointConfig": Place("checkpoint", "worker:kept", files | looks | {
            "train.steps": 5, "checkpoint.every": 1, "checkpoint.keep_best": 0,
        }, {
            "every": 3,
            "asynchronous": Case(False, "worker:threads"),
            "keep_last": Case(3, "worker:kept planned:disk"),
            "keep_best": Case(3, "worker:kept planned:disk"),
            "keep_every": Case(2, "worker:kept planned:disk", {"checkpoint.every": 100}),
        }),
        "ScaleConfig": Place("scale", "split", spread | files | {"data.batch_size": 16}, {
            "dp_replicate": Case(2, "split planned:traffic"),
            "reshard_after_forward": Case(False, "split planned:traffic"),
            "activation_checkpointing": [
                Case(True, "steps:calls planned:memory", {"scale.workers": 1, "data.batch_size": 4}),
                Case(True, "planned:traffic", {"scale.ep": 4}),
            ],
            "compile": Case(True, "compiled", {"scale.workers": 1}),
            "overlap_chunks": Case(2, given={"scale.ep": 4}),
            "workers": Case(2, "split planned:traffic requests:workers requests:all"),
            "ep": Case(2, "split planned:traffic"),
            "workers_per_node": Case(2, "planned:traffic"),
            "use_gpu": [
                Case(True, "requests:gpu requests:each requests:placement requests:backend requests:all"),
                Case(True, "requests:compute planned:memory device"),
            ],
            "min_workers": Case(3, "waits"),
            "wait_s": Case(5.0, "waits"),
            "deterministic": Case(True, "worker:modes", {"scale.workers": 1}),
            "profile_steps": Case(1, "worker:files", {"scale.workers": 1, "train.steps": 9}),
        }),
        "ViTConfig": Place("model", "read:train read:val", files, {
            "image_size": 16,
        }),
    }  # fmt: skip

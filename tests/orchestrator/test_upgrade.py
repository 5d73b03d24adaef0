"""Configs that version 0.2 recorded: read in today's form, with the same pixels to the bit."""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.codec import override, read_config, to_dict
from orchestrator.config import DataConfig, RunConfig
from orchestrator.config_file import read_toml, to_toml
from orchestrator.data.augment import InceptionConfig, MixupConfig, RandAugmentConfig
from orchestrator.data.stream import in_process, open_stream
from orchestrator.errors import UsageError
from orchestrator.packing.pack import Sample, write_shards
from orchestrator.runs.run_directory import RunDir, RunRecord
from orchestrator.runs.sweep_directory import SweepDir, SweepRecord
from orchestrator.upgrade import upgraded, upgraded_arm
from tests.parts import png

# Batches of version 0.2 by the fields of its `data`: SHA-256 of images, labels and mixing, of images of 92 x
# 120 pixels, which are cropped, and of 16 x 16, which are kept decoded. All combinations in use.
GOLDEN: dict[str, dict[str, Any]] = json.loads(Path("tests/fixtures/augmentation.json").read_text())
NONE = {
    "augment": "none",
    "randaugment": 0,
    "randaugment_magnitude": 10,
    "three_augment": False,
    "color_jitter": 0.0,
    "random_erasing": 0.0,
    "mixup": 0.0,
    "cutmix": 0.0,
}
LIGHT = {"augment": "inception", "randaugment": 2, "mixup": 0.2}
MEMBERS = InceptionConfig(), RandAugmentConfig(operations=2, magnitude=10), MixupConfig(alpha=0.2)


def of_before(run: RunConfig, **fields: Any) -> dict[str, Any]:
    """Returns the config as version 0.2 recorded it."""
    tree = to_dict(run)
    del tree["data"]["augment"]
    return {**tree, "data": tree["data"] | NONE | fields}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, int]]:
    """Data sets of 12 images in squares of 4 x 4 pixels, with the size of the model."""
    found, root = dict[str, tuple[str, int]](), tmp_path_factory.mktemp("shards")
    for name, height, width, size in (("large", 92, 120, 24), ("small", 16, 16, 16)):
        rng = np.random.default_rng(7)
        samples = list[Sample]()
        for i in range(12):
            squares = rng.integers(0, 256, (height // 4, width // 4, 3))
            samples.append(Sample(png(np.kron(squares, np.ones((4, 4, 1))).astype(np.uint8)), i % 3, f"{i}"))
        write_shards(str(root / name), ["a", "b", "c"], {"train": samples, "val": samples})
        found[name] = str(root / name), size
    return found


@pytest.mark.parametrize("recipe", GOLDEN)
def test_pixels_are_those_of_version_0_2(recipe: str, shards: dict[str, tuple[str, int]]) -> None:
    for which, (path, size) in shards.items():
        changes = {"data.path": path, "data.batch_size": 6, "data.lanes": 3, "data.repeats": 3}
        changes |= {"model.image_size": size, "model.patch_size": 4, "train.seed": 3}
        recorded = of_before(override(RunConfig(), changes), **GOLDEN[recipe]["fields"])
        run = read_config(RunConfig, upgraded(recorded))
        digest = hashlib.sha256()
        for batch in in_process(open_stream(run, "train", 0, 1), range(3, 6)):
            for field in ("image", "label", "mix"):
                if field in batch.fields:
                    digest.update(batch[field].contiguous().numpy().tobytes())
        assert digest.hexdigest() == GOLDEN[recipe][which]


def test_todays_form_stays_as_it_is() -> None:
    tree = to_dict(RunConfig(data=DataConfig(augment=MEMBERS)))
    assert upgraded(tree) == tree
    arm = {"data.augment.mixup.alpha": 0.3, "train.lr": 1.0}
    assert upgraded_arm(arm, tree) == arm
    assert upgraded({"model": {}}) == {"model": {}}


def test_the_loss_of_gshard_had_the_name_of_top_ks(tmp_path: Path) -> None:
    token = override(RunConfig(), {"model.moe.router.kind": "token_choice"})
    top = override(RunConfig(), {"model.moe.router.kind": "top_k"})
    recorded = json.loads(json.dumps(to_dict(token)).replace("gshard_balance_weight", "balance_weight"))
    assert upgraded(recorded) == to_dict(token)
    assert upgraded(to_dict(top)) == to_dict(top)
    weight, kind = "model.moe.router.balance_weight", "model.moe.router.kind"
    today = "model.moe.router.gshard_balance_weight"
    with pytest.raises(UsageError, match="did you mean 'gshard_balance_weight'"):
        override(token, {weight: 0.1})
    assert upgraded_arm({weight: 0.1}, recorded) == {today: 0.1}
    assert upgraded_arm({weight: 0.1, kind: "token_choice"}, to_dict(top)) == {
        today: 0.1,
        kind: "token_choice",
    }
    assert upgraded_arm({weight: 0.1, kind: "top_k"}, recorded) == {weight: 0.1, kind: "top_k"}
    whole = {"model.moe.router": {"kind": "token_choice", "balance_weight": 0.1}}
    assert upgraded_arm(whole, {}) == {
        "model.moe.router": {"kind": "token_choice", "gshard_balance_weight": 0.1}
    }


def test_a_run_of_before(tmp_path: Path) -> None:
    recorded = of_before(RunConfig(name="was", storage=str(tmp_path)), **LIGHT)
    record = RunRecord(key="k", began_s=0.0, config=recorded, data_digest="", labels={}, contents={})
    (tmp_path / "was").mkdir()
    (tmp_path / "was" / "config.json").write_text(json.dumps(asdict(record)))
    found = RunDir(str(tmp_path / "was")).record()
    assert found
    assert read_config(RunConfig, found.config).data.augment == MEMBERS


def test_an_arm_of_before_changed_fields_one_by_one(tmp_path: Path) -> None:
    """A change of the crop left RandAugment and mixup of the base as they were."""
    base = of_before(RunConfig(name="was", storage=str(tmp_path)), **LIGHT)
    arms = {
        "resize": {"data.augment": "none", "data.randaugment": 0},
        "crop": {"data.augment": "crop"},
        "wide": {"model.width": 32},
    }
    record = SweepRecord(
        key="k", name="was", began_s=0.0, base=base, data_digest="", quality="val/acc1", cost="c", arms=arms
    )
    (tmp_path / "was").mkdir()
    (tmp_path / "was" / "sweep.json").write_text(json.dumps(asdict(record)))
    found = SweepDir(str(tmp_path / "was")).record()
    assert found
    run = read_config(RunConfig, found.base)
    kinds = {
        arm: [member.kind for member in override(run, changes).data.augment]
        for arm, changes in found.arms.items()
    }
    assert kinds == {
        "resize": ["mixup"],
        "crop": ["crop", "randaugment", "mixup"],
        "wide": ["inception", "randaugment", "mixup"],
    }


def test_a_file_of_fields_of_before_and_of_today(tmp_path: Path) -> None:
    (tmp_path / "was.toml").write_text('[data]\naugment = "inception"\nrandaugment = 2\nmixup = 0.2\n')
    assert override(RunConfig(), read_toml(str(tmp_path / "was.toml"), "")).data.augment == MEMBERS
    run = RunConfig(data=DataConfig(augment=MEMBERS))
    (tmp_path / "now.toml").write_text(to_toml(run))
    assert override(RunConfig(), read_toml(str(tmp_path / "now.toml"), "")).data == run.data
    (tmp_path / "table.toml").write_text("[data.augment.mixup]\nalpha = 0.3\n[data.augment.inception]\n")
    found = override(RunConfig(), read_toml(str(tmp_path / "table.toml"), "")).data.augment
    assert found == (InceptionConfig(), MixupConfig(alpha=0.3))


def test_a_record_without_the_pixels_of_evaluation_is_of_a_model_that_saw_parts_of_pixels() -> None:
    old = to_dict(RunConfig())
    del old["data"]["eval_pixels"]
    assert read_config(RunConfig, upgraded(old)).data.eval_pixels == "parts"
    assert "eval_pixels" not in upgraded({"data": {"eval_crop": 1.0}})["data"]

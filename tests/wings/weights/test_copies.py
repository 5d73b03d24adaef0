"""One model out of the files that trainers save: equal to its plain file, and what was left out is said."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from orchestrator.errors import UsageError
from tests.wings.weights.foreign_files import GOLDENS
from wings.weights import Import, is_foreign, plan_import

State = dict[str, Tensor]
SAID = {"model.heads": 2}


def below(prefix: str, state: State) -> State:
    return {f"{prefix}{name}": tensor for name, tensor in state.items()}


def other(state: State) -> State:
    return {name: tensor + 1 for name, tensor in state.items()}


def chunked(state: State) -> State:
    """Blocks in chunks, as DINOv2 trains them: block 1 is the second place of chunk 0."""
    return {name.replace("blocks.", "blocks.0.", 1): tensor for name, tensor in state.items()}


# What is saved of a state dict -> words of the notes.
SAVED: dict[str, tuple[Callable[[State], Any], tuple[str, ...]]] = {
    "compiled": (lambda s: below("_orig_mod.", s), ("names without _orig_mod",)),
    "data parallel": (lambda s: below("module._orig_mod.", s), ("names without _orig_mod, module",)),
    "FSDP": (lambda s: below("_fsdp_wrapped_module.", s), ("names without _fsdp_wrapped_module",)),
    "block by block": (
        lambda s: {name.replace("blocks.1.", "blocks.1._orig_mod."): t for name, t in s.items()},
        ("names without _orig_mod",),
    ),
    "AveragedModel": (
        lambda s: {"n_averaged": torch.tensor(3), **below("module.", s)},
        ("counters left out: n_averaged",),
    ),
    "counters": (
        lambda s: {**s, "num_batches_tracked": torch.tensor(3), "step": torch.tensor(3.0), "epoch": 2},
        ("counters left out: num_batches_tracked, step", "no tensors, and left out: epoch"),
    ),
    "Lightning": (
        lambda s: {"epoch": 3, "state_dict": {**below("model.", s), "criterion.weight": torch.ones(2)}},
        ("the model at 'state_dict.model' is taken", "left out beside it: state_dict.criterion"),
    ),
    "nested": (lambda s: below("model.module.encoder.", s), ("the model at 'model.encoder'",)),
    "MAE": (
        lambda s: {
            "model": s,
            "optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}},
            "args": argparse.Namespace(lr=1),
        },
        ("the model at 'model'", "beside it: optimizer", "no tensors, and left out: args"),
    ),
    "MAE's decoder": (
        lambda s: {
            "model": {**s, "decoder_blocks.0.norm1.weight": torch.ones(2), "mask_token": torch.ones(1)}
        },
        ("left out: decoder_blocks.0.norm1.weight, mask_token",),
    ),
    "model_state_dict": (lambda s: {"model_state_dict": s}, ("the model at 'model_state_dict' is taken",)),
    "timm": (
        lambda s: {"state_dict": other(s), "state_dict_ema": below("module.", s)},
        ("the model at 'state_dict_ema' is taken, not state_dict",),
    ),
    "DINO": (
        lambda s: {
            "student": below("module.backbone.", other(s)),
            "teacher": {**below("backbone.", s), "head.mlp.0.weight": torch.ones(2, 2)},
            "dino_loss": {"center": torch.ones(1, 2)},
        },
        (
            "the model at 'teacher.backbone' is taken, not student.backbone",
            "student (32 tensors), teacher.head, dino_loss",
        ),
    ),
    "DINOv2": (lambda s: {"teacher": below("backbone.", chunked(s))}, ("the model at 'teacher.backbone'",)),
    "optimiser by name": (
        lambda s: {**s, "optimizer": {"exp_avg": other(s)}},
        ("left out beside it: optimizer (32 tensors)",),
    ),
    "OpenCLIP": (
        lambda s: {
            **below("visual.trunk.", s),
            "text.ln.weight": torch.ones(2),
            "logit_scale": torch.ones(()),
        },
        ("the model at 'visual.trunk'", "beside it: text, logit_scale", "the text tower is left out"),
    ),
}


def equal(found: Import, state: State) -> bool:
    """Whether all tensors that are taken over as they are equal those of timm's `state`."""
    taken = [lazy for lazy in found.plan.tensors.values() if lazy.sources]
    plain = plan_import(
        str(GOLDENS / "timm_token" / "model.safetensors"), name="x", changes=SAID
    ).plan.tensors
    assert len(taken) == len(plain) == len(state)
    return all(torch.equal(found.plan.tensors[name].read(), lazy.read()) for name, lazy in plain.items())


@pytest.mark.parametrize("case", SAVED)
def test_what_trainers_save_is_the_model_itself(case: str, tmp_path: Path) -> None:
    """Under any name of the file."""
    state = load_file(GOLDENS / "timm_token" / "model.safetensors")
    of, words = SAVED[case]
    torch.save(of(state), tmp_path / "x.pth.tar")
    assert is_foreign(str(tmp_path / "x.pth.tar"))
    found = plan_import(str(tmp_path / "x.pth.tar"), name="x", changes=SAID)
    assert equal(found, state)
    for word in words:
        assert word in str(found), found


def test_other_libraries_and_formats_alike(tmp_path: Path) -> None:
    """Their heads are beside what they call the model; what is left out is not read of any format."""
    for kind, changes in (("torchvision_vit.pth", SAID), ("hf_vit", {})):
        plain = plan_import(str(GOLDENS / kind), name="x", changes=changes)
        tensors = {name: lazy.read() for name, lazy in plain.opened.tensors.items()}
        folder = tmp_path / kind
        folder.mkdir()
        for name in ("config.json", "preprocessor_config.json"):
            if plain.opened.config:
                (folder / name).write_bytes((GOLDENS / kind / name).read_bytes())
        save_file(
            {**below("model._orig_mod.", tensors), "step": torch.tensor(3)}, folder / "model.safetensors"
        )
        source = folder if plain.opened.config else folder / "model.safetensors"
        found = plan_import(str(source), name="x", changes=changes)
        assert found.plan.tensors.keys() == plain.plan.tensors.keys()
        for name, lazy in plain.plan.tensors.items():
            assert torch.equal(found.plan.tensors[name].read(), lazy.read()), (kind, name)
        assert "head" not in found.plan.made, kind


def test_a_copy_is_taken_by_name_and_asked_for_where_none_is_the_average(tmp_path: Path) -> None:
    state = load_file(GOLDENS / "timm_token" / "model.safetensors")
    path = tmp_path / "x"

    def planned(copy: str | None = None) -> Import:
        return plan_import(str(path), name="x", changes=SAID, copy=copy)

    torch.save({"teacher": below("backbone.", other(state)), "student": below("backbone.", state)}, path)
    assert equal(planned("student"), state)
    assert not equal(planned("teacher"), state)
    with pytest.raises(
        UsageError, match=r"\(teacher\.backbone, student\.backbone\): 0 of them are called 'ema'"
    ):
        planned("ema")
    small = {name: tensor for name, tensor in state.items() if "blocks.1." not in name}
    for models in (
        {"encoder": other(state), "target_encoder": state},
        {"teacher": state, "student": small},  # of another model, and no average
        {"ema": other(state), "teacher": state},
    ):
        torch.save(models, path)
        with pytest.raises(UsageError, match=rf"several models \({', '.join(models)}\): say by `copy` which"):
            planned()


def test_what_only_looks_like_weights(tmp_path: Path) -> None:
    state = load_file(GOLDENS / "timm_token" / "model.safetensors")
    path = tmp_path / "x"
    for saved, says in (
        ({**state, "norm.weight": state["norm.weight"].int()}, "norm.weight is torch.int32, and weights are"),
        (below("module.", state) | state, "two tensors of a name"),
        (
            {**state, **{f"blocks.0.{name[7:]}": t for name, t in state.items() if "blocks.1" in name}},
            "in stages",
        ),
        ([state], "holds no state dict but a list"),
    ):
        torch.save(saved, path)
        with pytest.raises(UsageError, match=says):
            plan_import(str(path), name="x", changes=SAID)
    loop: dict[str, Any] = {"model": state}
    loop["self"] = loop
    torch.save(loop, path)
    assert equal(plan_import(str(path), name="x", changes=SAID), state)


def test_two_towers_and_optimisers_of_jax(tmp_path: Path) -> None:
    """SigLIP's files have an image tower, a text tower, a temperature and a bias."""
    plain = plan_import(str(GOLDENS / "big_vision_map.npz"), name="x")
    with np.load(GOLDENS / "big_vision_map.npz") as file:
        arrays = {name.removeprefix("params/"): file[name] for name in file.files}
    moments = {f"opt/0/mu/{name}": array for name, array in arrays.items()}
    counters = {"opt/0/count": np.int32(3), "step": np.int64(3)}
    towers = {f"params/img/{name}": array for name, array in arrays.items()}
    towers |= {"params/txt/Embed_0/embedding": np.ones((5, 8), np.float32)}
    towers |= {"params/t": np.ones(1, np.float32), "params/b": np.ones(1, np.float32)}
    for case, saved, words in (
        ("towers", {**towers, **counters}, ("params/txt, params/t, params/b", "the text tower is left out")),
        ("training", {**arrays, **moments, **counters}, ("beside it: opt", "counters left out: step")),
    ):
        np.savez(tmp_path / case, **saved)
        found = plan_import(str(tmp_path / f"{case}.npz"), name="x")
        for name, lazy in plain.plan.tensors.items():
            assert torch.equal(found.plan.tensors[name].read(), lazy.read()), (case, name)
        for word in words:
            assert word in str(found), found


def test_the_content_decides_what_a_file_is(tmp_path: Path) -> None:
    """Not its name: as `import_weights.py` opens it, so do the other commands."""
    for content in ("timm_token/model.safetensors", "torchvision_vit.pth", "augreg.npz"):
        for name in ("x", "x.pkl", "x.safetensors", "x.npz", "last.ckpt"):
            (tmp_path / name).write_bytes((GOLDENS / content).read_bytes())
            assert is_foreign(str(tmp_path / name)), (content, name)
            assert plan_import(str(tmp_path / name), name="x", changes=SAID).plan.tensors
    (tmp_path / "x.safetensors").write_bytes(b"cut")  # in the place of a file of ours
    (tmp_path / "run").write_text("notes")  # a run may have that name
    (tmp_path / "x.pth").write_text("<html>404")  # is refused with a reason
    assert [is_foreign(str(tmp_path / name)) for name in ("x.safetensors", "run", "x.pth")] == [
        False,
        False,
        True,
    ]
    assert is_foreign(str(GOLDENS / "hf_vit"))
    assert not is_foreign(str(tmp_path))

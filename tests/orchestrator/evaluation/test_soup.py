"""A soup is the mean of its models, and different models are refused."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from moe.exported import load
from orchestrator.checkpoint.models import ModelRef, read_model
from orchestrator.checkpoint.weights import read_metadata, write_file
from orchestrator.errors import UsageError
from orchestrator.evaluation.soup import write_soup
from tests.orchestrator.evaluation.exported import SOFT, exported


@pytest.fixture
def trained(tmp_path):
    """``trained(seed, **changes)``: a model of random weights in an exported file."""
    return lambda seed, **changes: exported(tmp_path / f"seed{seed}.safetensors", {**SOFT, **changes}, seed)


def weights(model: ModelRef) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.load().state_dict().items()}


def soup(tmp_path, *models: ModelRef) -> dict[str, torch.Tensor]:
    write_soup(models, f"{tmp_path}/soup.safetensors", fresh=True)
    return weights(read_model(f"{tmp_path}/soup.safetensors"))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """-0.0 equals 0.0, their bits do not."""
    return tensor.view(torch.int32)


def test_of_one_it_is_that_model_bit_for_bit(trained, tmp_path):
    one = trained(0)
    tensors = weights(one)
    tensors["head.bias"][:3] = torch.tensor([-0.0, 1e-45, 3.4e38])  # sign of zero, subnormal, nearly infinite
    write_file(one.location, tensors, read_metadata(one.location))
    found = soup(tmp_path, one)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(bits(found[name]), bits(tensors[name])) for name in tensors)


@pytest.mark.parametrize("count", [2, 3])
def test_it_is_the_mean(count, trained, tmp_path):
    """In higher precision: exact for two, since (a + b) / 2 in float64 is; of three within half a unit in the
    last place. Numpy's `longdouble` is float128 on x86, and float64 elsewhere.
    """
    models = [trained(seed) for seed in range(count)]
    found, tensors = soup(tmp_path, *models), [weights(model) for model in models]
    for name in found:
        parts = [tensor[name].numpy() for tensor in tensors]
        mean = sum(part.astype(np.longdouble) for part in parts) / count
        assert found[name].dtype == torch.float32
        if count == 2:
            np.testing.assert_array_equal(found[name].numpy(), mean.astype(np.float32))
        error, spacing = np.abs(found[name].numpy() - mean), np.spacing(np.abs(found[name].numpy()))
        assert (error <= spacing / 2 + 2.0**-52 * np.abs(parts).max(0)).all(), name
    assert not torch.equal(found["head.weight"], tensors[0]["head.weight"])


def test_it_is_a_model_like_others(trained, tmp_path):
    """Of its own name, so that no run of MLflow passes for the one that trained it; `moe.load` reads it."""
    one, two = trained(0), trained(1)
    write_soup([one, two], f"{tmp_path}/broth.safetensors")
    found = read_model(f"{tmp_path}/broth.safetensors")
    assert found.step == -1
    assert found.run == replace(one.run, name="broth")
    images = torch.rand(2, 3, 8, 8)
    assert torch.equal(load(found.location)(images).logits, found.load()(images).logits)
    made_of = json.loads(read_metadata(found.location)["soup"])
    assert [part["location"] for part in made_of] == [one.location, two.location]
    assert made_of[0]["step"] == 7


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.width": 32}, r"model\.width is 16 in .*seed0\.safetensors, 32 in .*seed1\.safetensors"),
        ({"model.moe.router.kind": "token_choice"}, r"model\.moe\.router\.kind is soft in .*, token_choice"),
        ({"data.eval_crop": 0.5}, r"signature\.crop is 0\.875 in .*, 0\.5 in"),
    ],
)
def test_different_models_are_refused(changes, message, trained, tmp_path):
    with pytest.raises(UsageError, match=message):
        soup(tmp_path, trained(0), trained(1, **changes))
    assert not (tmp_path / "soup.safetensors").exists()


def test_models_that_began_with_other_weights_are_refused(trained, tmp_path):
    """The start is another seed or another model; fine-tuned with several seeds models have begun alike."""
    with pytest.raises(
        UsageError, match=r"the start is the weights of seed 0 in .*, the weights of seed 1 in"
    ):
        soup(tmp_path, trained(0), trained(1, **{"train.seed": 1}))
    one = trained(0, **{"train.init_from": "/a"})
    with pytest.raises(UsageError, match=r"the start is /a in .*seed0\.safetensors, /b in .*seed1"):
        soup(tmp_path, one, trained(1, **{"train.init_from": "/b"}))
    soup(tmp_path, one, trained(1, **{"train.init_from": "/a", "train.seed": 1}))


def named(model: ModelRef, classes: tuple[str, ...] | None) -> ModelRef:
    return replace(model, signature=replace(model.signature, classes=classes))


def test_models_of_other_classes_are_refused(trained, tmp_path):
    """Known in another order; where only one model's classes are known, they are the soup's."""
    names = tuple("0123456789")
    one, two = named(trained(0), names), trained(1)
    with pytest.raises(UsageError, match=r"class 0 is 0 in .*seed0\.safetensors, 9 in .*seed1\.safetensors"):
        soup(tmp_path, one, named(two, names[::-1]))
    with pytest.raises(UsageError, match=r"class 0 is 0 in .*seed0\.safetensors, 9 in .*seed1\.safetensors"):
        soup(tmp_path, named(two, None), one, named(two, names[::-1]))
    assert not (tmp_path / "soup.safetensors").exists()
    soup(tmp_path, named(two, None), one)
    assert read_model(f"{tmp_path}/soup.safetensors").classes == names


def test_tensors_that_the_config_does_not_describe(trained, tmp_path):
    one, two = trained(0), trained(1)
    tensors = weights(two) | {"head.bias": torch.zeros(9)}
    write_file(two.location, tensors, read_metadata(two.location))
    with pytest.raises(UsageError, match=r"seed1\.safetensors holds head\.bias as torch\.float32 \[9\], "):
        soup(tmp_path, one, two)


def test_names_that_are_refused(trained, tmp_path):
    for out in ("s3://bucket/soup.safetensors", f"{tmp_path}/soup.pt"):
        with pytest.raises(UsageError, match=r"a soup is a local file that ends in \.safetensors"):
            write_soup([trained(0)], out)
    with pytest.raises(UsageError, match=r"seed0\.safetensors exists already; `fresh`"):
        write_soup([trained(0)], f"{tmp_path}/seed0.safetensors")

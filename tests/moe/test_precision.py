"""One rank without a mesh computes what a mesh of one rank computes, in float32 and bfloat16."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from moe.layer import MoELayer
from moe.layout import ParallelConfig
from moe.models.vit import ViT
from moe.parallel import accumulate, build_sharded, build_whole, update
from moe.routers import ExpertChoiceConfig, MixtureConfig, RouterConfig, SoftConfig, TokenChoiceConfig
from moe.routers.affinity import SinkhornConfig, SparseTransportConfig
from tests.lanes import mostly_slow
from tests.moe.parity import BATCH, SEED, Case, batches, local, one_rank, wake
from tests.moe.parts import vit_config
from tests.moe.test_parallel import TO_COMPILE

CPU = torch.device("cpu")
CHECKPOINTED = ParallelConfig(activation_checkpointing=True)
# Relative; the largest were 1e-3 in float32 and 5e-3 in bfloat16, of sparse transport.
LATER = {None: 5e-3, torch.bfloat16: 2e-2}
CASES: dict[str, RouterConfig | None] = {
    "dense": None,
    "soft": SoftConfig(noise_std=0.5),
    "token choice": TokenChoiceConfig(k=2, priority="max"),
    "expert choice": ExpertChoiceConfig(noise_std=1.0),
    "sinkhorn": TokenChoiceConfig(affinity=SinkhornConfig(), combine="affinity"),
    "sinkhorn expert choice": ExpertChoiceConfig(affinity=SinkhornConfig(), combine="affinity"),
    "sparse transport": ExpertChoiceConfig(
        capacity_factor=2.0, affinity=SparseTransportConfig(iterations=50)
    ),
    "mixture": MixtureConfig(level="hierarchical"),
}


def trained(
    model: ViT, case: Case, microbatches: int
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses and gradient norms of some steps, and the gradients of the first before they are clipped."""
    wake(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    losses, norms, first = [], [], {}
    for batch in batches(case):
        optimizer.zero_grad()
        losses.append(0.0)
        parts = zip(*(field.chunk(microbatches) for field in batch), strict=True)
        for i, (images, labels, keys_B) in enumerate(parts):
            accumulate(model, last=i == microbatches - 1)
            output = model(images, keys_B=keys_B)
            loss = F.cross_entropy(output.logits, labels, reduction="sum") / BATCH + output.aux / microbatches
            loss.backward()
            losses[-1] += loss.item()
        first = first or {parameter: p.grad.clone() for parameter, p in model.named_parameters()}
        norms.append(update(model, optimizer, 0.5).item())
    return losses, norms, first


@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [ParallelConfig(), CHECKPOINTED], ids=["kept", "recomputed"])
@pytest.mark.parametrize("name", mostly_slow(CASES, fast=["token choice"]))
def test_equals_a_mesh_of_one_rank(name, options, compute_dtype):
    """Gradients of equal weights are equal to the bit; microbatches add up in float32 in both. Norms are
    summed in another order, so later weights may round to other numbers, which transport plans amplify."""
    case = Case(config=vit_config(CASES[name], expert_dropout=0.1), dtype=torch.float32, steps=4)
    how = {"seed": SEED, "options": options, "compute_dtype": compute_dtype}
    whole = build_whole(case.config, CPU, **how)
    losses, norms, gradients = trained(whole, case, 2)
    with one_rank("cpu") as mesh:
        sharded = build_sharded(case.config, mesh, **how)
        expected_losses, expected_norms, expected_gradients = trained(sharded, case, 2)
        for parameter, ours in gradients.items():
            assert ours.dtype == torch.float32
            theirs, ours = local(expected_gradients[parameter], ours)
            assert torch.equal(theirs, ours), parameter
    assert norms[0] == pytest.approx(expected_norms[0], rel=1e-6)
    assert losses[0] == expected_losses[0]
    assert losses + norms == pytest.approx(expected_losses + expected_norms, rel=LATER[compute_dtype])
    assert len({*losses, *norms}) == 8, "the weights change"


def test_copies_take_the_places_of_weights_and_routers_keep_theirs():
    model = build_whole(vit_config(SoftConfig()), CPU, seed=SEED, compute_dtype=torch.bfloat16)
    weights, seen = dict(model.named_parameters()), {}

    def see(module: torch.nn.Module, *_: object) -> None:
        seen.update({f"{names[module]}.{name}": p for name, p in module.named_parameters(recurse=False)})

    names = {module: name for name, module in model.named_modules() if module is not model}
    for module in names:
        module.register_forward_pre_hook(see)
    output = model(torch.randn(2, 3, 8, 8))
    assert output.logits.dtype == torch.float32
    layers = {f"{n}.router." for n, module in model.named_modules() if isinstance(module, MoELayer)}
    assert seen.keys() == weights.keys() - {"position_SD"}, "of the model itself, which `names` leaves out"
    for name, used in seen.items():
        routes = name.startswith(tuple(layers))
        assert (used is weights[name]) == routes
        assert used.dtype == (torch.float32 if routes else torch.bfloat16)
        assert torch.equal(used, weights[name].to(used.dtype))
    assert all(p is weights[name] for name, p in model.named_parameters()), "they are back"
    assert model.state_dict().keys() == ViT(model.config).state_dict().keys()


def test_an_error_in_a_forward_pass_leaves_the_weights_in_their_places():
    model = build_whole(vit_config(None), CPU, seed=SEED, compute_dtype=torch.bfloat16)
    with pytest.raises(RuntimeError):
        model(torch.zeros(2, 3, 8, 8, dtype=torch.complex64))
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_frozen_weights_get_no_gradient():
    model = build_whole(vit_config(None), CPU, seed=SEED, compute_dtype=torch.bfloat16)
    wake(model)
    for parameter in model.blocks.parameters():
        parameter.requires_grad_(False)
    model(torch.randn(2, 3, 8, 8)).logits.sum().backward()
    assert all(p.grad is None for p in model.blocks.parameters())
    assert model.head.weight.grad.dtype == torch.float32


@pytest.mark.slow
@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16], ids=str)
def test_compiled_blocks_are_whole_graphs(compute_dtype):
    """On one rank nothing breaks the graph of a block. Dense and MoE blocks have a graph each."""
    torch.compiler.reset()
    config = replace(TO_COMPILE.config, depth=6)
    options = ParallelConfig(compile=True)
    model = build_whole(config, CPU, seed=SEED, options=options, compute_dtype=compute_dtype)
    torch._dynamo.utils.counters.clear()
    images, keys_B = torch.randn(BATCH, 3, 8, 8), torch.arange(BATCH)
    for _ in range(2):
        model(images, keys_B=keys_B).logits.sum().backward()
    found = torch._dynamo.utils.counters
    assert (found["stats"]["unique_graphs"], sum(found["graph_break"].values())) == (2, 0)


def test_features_are_those_of_the_forward_pass():
    model = build_whole(vit_config(SoftConfig()), CPU, seed=SEED, compute_dtype=torch.bfloat16)
    wake(model)
    x, seen = torch.randn(2, 3, 8, 8), []
    model.head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.inference_mode():
        model(x)
    assert torch.equal(model.features(x), seen[0])
    model(x).logits.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_it_cannot_be_copied():
    """The copy would compute with the weights of the original."""
    model = build_whole(vit_config(None), CPU, seed=SEED, compute_dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="a model with rounded copies of its weights cannot be copied"):
        copy.deepcopy(model)

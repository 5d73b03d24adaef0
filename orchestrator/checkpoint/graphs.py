"""Models as graphs that run without our sources: programs of torch.export, and ONNX.

The number of images is free: as in the model, empty images fill the last routing group. Routing is a part of
the graph: capacity, k and the number of iterations are those of the model's evaluation. A dropless router has
a slot for every token in each expert, which computes the same in rows of a fixed number.
"""

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils._sympy.value_ranges import ValueRanges

from moe.model import Model
from moe.signature import SIGNATURE, Signature
from orchestrator import storage
from orchestrator.errors import UsageError

OPSET = 18
Run = Callable[[Tensor], Mapping[str, Tensor]]


class Prediction(nn.Module):
    """A model in evaluation: images (B, 3, H, W) in -1..1 -> its heads by name."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        return self.model(images).heads


def program_of(model: Model) -> ExportedProgram:
    """Returns the program of a model in evaluation, for any number of images."""
    group, size = model.config.images_per_group, model.config.image_side()
    # Of a single group torch would make a constant.
    images = torch.zeros(2 * group + 1, 3, size, size)
    program = torch.export.export(
        Prediction(model),
        (images,),
        dynamic_shapes={"images": {0: Dim("images", min=group + 1)}},
        prefer_deferred_runtime_asserts_over_guards=group > 1,
    )
    # Guards, assertions and ranges only say that there were several groups; with one the program is the same.
    program._guards_code = []
    for node in program.graph.find_nodes(op="call_function", target=torch.ops.aten._assert_scalar.default):
        program.graph.erase_node(node)
    program.graph.eliminate_dead_code()
    program.graph_module.recompile()
    for symbol, known in [*program.range_constraints.items()]:
        program.range_constraints[symbol] = ValueRanges(1, known.upper)
    return program


def write_program(model: Model, out: str, signature: Signature) -> float:
    """Writes what ``torch.export.load(out).module()(images)["logits"]`` runs, with the signature as JSON in
    the extra file ``signature``, and returns `difference`.

    Raises OSError if writing fails.
    """

    def save(path: str) -> None:
        torch.export.save(program_of(model), path, extra_files={SIGNATURE: signature.to_json()})

    _write(out, save)
    return difference(model, torch.export.load(out).module())


def write_onnx(model: Model, out: str, signature: Signature) -> float:
    """Writes what onnxruntime runs, with the signature as JSON in the metadata ``signature``, and returns
    `difference`.

    Raises:
        UsageError: if a package is missing.
        OSError: if writing fails.
    """
    runtime = _package("onnxruntime")
    translations = _translations()
    program, names = program_of(model), list(model.config.gives)
    graph = torch.onnx.export(
        program,
        dynamo=True,
        opset_version=OPSET,
        input_names=["images"],
        output_names=names,
        custom_translation_table=translations,
        verbose=False,
    )
    assert graph
    for node in graph.model.graph:
        node.metadata_props.clear()  # stacks of calls, with paths of this machine
    graph.model.metadata_props[SIGNATURE] = signature.to_json()
    _write(out, graph.save)
    session = runtime.InferenceSession(out, providers=["CPUExecutionProvider"])

    def run(images: Tensor) -> dict[str, Tensor]:
        outputs = session.run(names, {"images": images.numpy()})
        return {name: torch.from_numpy(array) for name, array in zip(names, outputs, strict=True)}

    return difference(model, run)


@torch.no_grad()
def difference(model: Model, run: Run) -> float:
    """Returns the largest difference of a graph's outputs from the model's, as a share of the largest output,
    on a random image, a routing group, and two groups and an image.

    Where a router's choice hangs on the last bit, another order of sums chooses otherwise.
    """
    found, size = 0.0, model.config.image_side()
    generator = torch.Generator().manual_seed(0)
    group = model.config.images_per_group
    for count in (1, group, 2 * group + 1):
        images = torch.rand(count, 3, size, size, generator=generator) * 2 - 1
        outputs = run(images)
        for name, wanted in model(images).heads.items():
            largest = wanted.abs().max().clamp(min=torch.finfo(wanted.dtype).tiny)
            found = max(found, float((outputs[name] - wanted).abs().max() / largest))
    return found


def _write(out: str, save: Callable[[str], Any]) -> None:
    """Writes a file as a whole or not at all. Weights of more than 2 GB lie in a second file of ONNX, which
    the first names.
    """
    path = Path(out)
    storage.make_folder(str(path.parent))
    with TemporaryDirectory(prefix=".", dir=path.parent) as folder:
        save(f"{folder}/{path.name}")
        for file in sorted(Path(folder).iterdir(), reverse=True):
            file.replace(path.with_name(file.name))


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise UsageError(f"ONNX needs the package {error.name}: pip install 'moe-frontier[export]'") from None


def _translations() -> dict[Any, Callable[..., Any]]:
    """Operators that torch's exporter lacks, by operators of ONNX."""
    op = getattr(_package("onnxscript"), f"opset{OPSET}")

    def sort_stable(self: Any, stable: bool, dim: int = -1, descending: bool = False) -> Any:
        """TopK puts the lower index first among equals, in either direction."""
        count = op.Gather(op.Shape(self), op.Constant(value_ints=[dim]))
        return op.TopK(self, count, axis=dim, largest=int(descending), sorted=1)

    def searchsorted(sorted_sequence: Any, self: Any, **_: Any) -> Any:
        """The place of a number is how many are smaller."""
        queue, wanted = (
            op.Unsqueeze(x, op.Constant(value_ints=[d])) for x, d in ((sorted_sequence, -2), (self, -1))
        )
        smaller = op.Cast(op.Less(queue, wanted), to=7)  # int64
        return op.ReduceSum(smaller, op.Constant(value_ints=[-1]), keepdims=0)

    aten = torch.ops.aten
    return {aten.sort.stable: sort_stable, aten.searchsorted.Tensor: searchsorted}

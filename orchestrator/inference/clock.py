"""A process that times models which were written to files, and does nothing else.

python -m orchestrator.inference.clock    reads a job as JSON, and prints a JSON line for each thing it finds

It imports only the runtime that it measures, and uses as many threads as the job says.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any, Literal, TypedDict

import numpy as np

from orchestrator.errors import UsageError
from orchestrator.inference.energy import energy_meter
from orchestrator.inference.timing import in_turns

Runtime = Literal["onnx", "torch"]


class ClockJob(TypedDict):
    """Files of models, and how they are called: on a batch of images with so many pixels per side. `plugins`:
    those that the models need -> their texts. `powercap`: where Linux shows the energy of processors.
    """

    runtime: Runtime
    threads: int
    batch: int
    files: list[str]
    sides: list[int]
    plugins: dict[str, str]
    at_most_s: float
    powercap: str


def timed(job: ClockJob) -> Iterator[dict[str, Any]]:
    """Yields the memory of each model, ``{"memory_mib": [..]}``, then the rounds, with the fields of
    `timing.Round`.
    """
    load = _onnx if job["runtime"] == "onnx" else _torch(job)
    calls = [
        (lambda file=file, side=side: load(file, job["batch"], side, job["threads"]))
        for file, side in zip(job["files"], job["sides"], strict=True)
    ]
    yield {"memory_mib": [_peak_mib(call) for call in calls]}
    try:
        meter = energy_meter(job["powercap"])
    except UsageError:
        meter = None
    for found in in_turns([call() for call in calls], at_most_s=job["at_most_s"], meter=meter):
        yield asdict(found)


def _images(batch: int, side: int) -> np.ndarray:
    return np.random.default_rng(0).uniform(-1, 1, (batch, 3, side, side)).astype(np.float32)


def _onnx(file: str, batch: int, side: int, threads: int) -> Callable[[], object]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    inputs = {session.get_inputs()[0].name: _images(batch, side)}
    return lambda: session.run(None, inputs)


def _torch(job: ClockJob) -> Callable[[str, int, int, int], Callable[[], object]]:
    import torch

    from moe.exported import load as load_exported
    from orchestrator.plugins import restored

    restored({plugin: text.encode() for plugin, text in job["plugins"].items()})
    torch.set_num_threads(job["threads"])
    torch.set_grad_enabled(False)

    def load(file: str, batch: int, side: int, _: int) -> Callable[[], object]:
        model, images = load_exported(file), torch.from_numpy(_images(batch, side))
        return lambda: model(images)

    return load


def _peak_mib(load: Callable[[], Callable[[], object]]) -> float:
    """Returns the peak memory of a process that loads one model and calls it: a copy of this one."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            call = load()
            for _ in range(2):
                call()
            os.write(write, str(_own_peak_mib()).encode())
        except BaseException as error:
            os.write(write, f"{type(error).__name__}: {error}".encode()[:4096])
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    try:
        return float(text)
    except ValueError:
        raise RuntimeError(
            text or "a process with a model ended without a word: too little memory?"
        ) from None


def _own_peak_mib() -> float:
    # What getrusage says of a process that another has started includes the memory of that one.
    try:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 2**10
    except OSError:  # macOS
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


if __name__ == "__main__":
    for found in timed(json.load(sys.stdin)):
        print(json.dumps(found), flush=True)

"""The time of each part of a step, and a profile of a few steps of the first worker: a table, a picture of it
and a trace.
"""

import gzip
import io
import logging
import tempfile
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile as torch_profile, record_function
from torch.utils.hooks import RemovableHandle

from moe.dense import MLP, Attention
from moe.experts import Experts
from moe.layer import MoELayer
from moe.model import Model
from moe.routing import Router
from orchestrator import storage
from orchestrator.data.batch import Batch
from orchestrator.runs.run_directory import PROFILE, PROFILE_PICTURE
from orchestrator.training.metrics import device_sync, write_csv

log = logging.getLogger(__name__)

PART = "part: "  # begins the names of `PARTS` in a trace
TRACE = "profile-trace.json.gz"  # in the run's directory; chrome://tracing and Perfetto open it
SKIPPED = 5  # first steps, slow because of caches, allocator and compilation
# Modules of a forward pass, experts with shared ones, and what is left of an MoE layer.
PARTS = ("attention", "router", "experts", "dispatch_combine", "mlp")
PHASES = ("data", "forward", "backward", "optimizer", "report", "evaluate", "checkpoint")
# Events within the phases. Their time is the kernel's on a GPU, else the time of launching and waiting.
ALL_TO_ALL = ("nccl:all_to_all", "_c10d_functional::all_to_all_single", "_c10d_functional::wait_tensor")


class _Times(threading.local):
    """Seconds by phase of the thread that trains a run, and GPU events that are still to be read."""

    def __init__(self) -> None:
        self.seconds = defaultdict[str, float](float)
        self.events = deque[tuple[str, torch.cuda.Event, torch.cuda.Event]]()

    def read_events(self) -> None:
        while self.events and self.events[0][2].query():
            name, begin, end = self.events.popleft()
            self.seconds[name] += begin.elapsed_time(end) / 1000


_times = _Times()
_phase = ""  # of the last thread that trains; a worker has one


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Names a part of a step, and takes its time, on a GPU by events of its stream, without waiting. While a
    profile is taken, it waits for the GPU at its end, so that parts do not overlap.
    """
    global _phase
    before, _phase = _phase, name
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if torch.cuda.is_initialized() else []
    began = time.perf_counter()
    with record_function(name):
        if events:
            events[0].record()
        yield
        _phase = before
        if events:
            events[1].record()
            _times.events.append((name, events[0], events[1]))
            _times.read_events()
        else:
            _times.seconds[name] += time.perf_counter() - began
        if torch.autograd._profiler_enabled():  # pyright: ignore[reportPrivateImportUsage]
            device_sync()


def current_phase() -> str:
    """Returns the phase that this process is in; empty between phases, where it waits for images."""
    return _phase


def phase_seconds() -> dict[str, float]:
    """Returns ``perf/<phase>_s``, the seconds of this worker in each phase since the last call. The GPU must
    have come to the end of its work (`device_sync`).
    """
    _times.read_events()
    found = {f"perf/{name}_s": seconds for name, seconds in _times.seconds.items()}
    _times.seconds.clear()
    return found


@contextmanager
def named_parts(model: Model) -> Iterator[None]:
    """Names the forward passes of a model's modules for the profiler, those that are repeated for a backward
    pass too.
    """
    names = {Attention: "attention", Router: "router", Experts: "experts", MoELayer: "moe", MLP: "mlp"}
    handles, ranges = list[RemovableHandle](), list[record_function]()

    def enter(name: str, *_: object) -> None:
        ranges.append(record_function(f"{PART}{name}"))
        ranges[-1].__enter__()

    def leave(*_: object) -> None:
        ranges.pop().__exit__(None, None, None)

    for path, module in model.named_modules():
        for kind, name in (names | ({MLP: "experts"} if path.endswith(".shared") else {})).items():
            if isinstance(module, kind):
                handles.append(module.register_forward_pre_hook(partial(enter, name)))
                handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def profiled(batches: Iterator[Batch], *, model: Model | None, steps: int, directory: str) -> Iterator[Batch]:
    """Yields the same batches; writes a profile of `steps` of them, after the first few, to `directory`.

    model: whose forward passes are parted; None, if it is compiled.
    """
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_initialized():
        activities.append(ProfilerActivity.CUDA)

    def write(profile: torch_profile) -> None:
        rows = profile_table(profile, steps)
        shown = [(name, f"{ms:.4g}", f"{share:.4f}") for name, ms, share in rows]
        write_csv(storage.join(directory, PROFILE), ("part", "ms_per_step", "share"), shown)
        storage.write_bytes(storage.join(directory, PROFILE_PICTURE), draw_profile(rows))
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder, "trace.json")
            profile.export_chrome_trace(str(trace))
            storage.write_bytes(storage.join(directory, TRACE), gzip.compress(trace.read_bytes()))
        parts = ", ".join(f"{name} {ms:.1f}" for name, ms, _ in rows)
        log.info("profile of %d steps, ms each: %s; trace in %s", steps, parts, directory)

    schedule = torch.profiler.schedule(wait=SKIPPED, warmup=1, active=steps, repeat=1)
    taken = torch_profile(activities=activities, schedule=schedule, on_trace_ready=write)
    with named_parts(model) if model else nullcontext(), taken as profile:
        while True:
            with phase("data"):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch
            profile.step()


def profile_table(profile: torch_profile, steps: int) -> list[tuple[str, float, float]]:
    """Returns (part of a step, its milliseconds, its share of the step). ``other`` is what no phase covers;
    ``all_to_all`` lies within forward and backward, and `PARTS` lie within forward, those of an evaluation
    within evaluate.
    """
    events = {event.key: event for event in profile.key_averages()}
    whole = sum(event.cpu_time_total for name, event in events.items() if name.startswith("ProfilerStep"))
    spent = {name: events[name].cpu_time_total if name in events else 0.0 for name in PHASES}
    spent["other"] = whole - sum(spent.values())
    sent = [events[name] for name in ALL_TO_ALL if name in events]
    spent["all_to_all"] = sum(event.device_time_total or event.cpu_time_total for event in sent)
    parts = {name: event for name, event in events.items() if name.startswith(PART)}
    spent |= dict.fromkeys(PARTS, 0.0)
    for name, event in parts.items():
        spent[name.removeprefix(PART)] = event.device_time_total or event.cpu_time_total
    spent["dispatch_combine"] = spent.pop("moe", 0.0) - spent["router"] - spent["experts"]
    spent["step"] = whole
    return [(name, us / steps / 1000, us / whole) for name, us in spent.items()]


def draw_profile(rows: Sequence[tuple[str, float, float]]) -> bytes:
    """Returns a table of `profile_table` as a PNG of bars; the parts of forward passes stand below these."""
    import matplotlib.figure

    ms = {name: each for name, each, _ in rows}
    names = [*PHASES, "other"]
    after_forward = names.index("forward") + 1
    names[after_forward:after_forward] = [name for name in PARTS if ms[name]]
    figure = matplotlib.figure.Figure(figsize=(6.4, 0.28 * len(names) + 0.8), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    colours = ["#9ab8d3" if name in PARTS else "#1f5f99" for name in names]
    bars = axes.barh([f"{name}  " for name in names], [ms[name] for name in names], color=colours)
    axes.bar_label(bars, [f"{ms[name]:.3g}" for name in names], padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel(f"ms of a step of {ms['step']:.3g} ms; pale: parts of forward passes")
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()

"""A run that saves step after step, killed and started again and again.

A parent that has torch, and neither threads nor connections, forks the lives: starting one takes a hundredth
of what importing torch takes. It is itself a fresh process (`live`), whatever the process of the tests did.
"""

import json
import multiprocessing
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import pairwise
from typing import NoReturn

import torch.distributed as dist

from orchestrator import storage
from orchestrator.checkpoint.manager import Checkpoints
from orchestrator.config import CheckpointConfig
from tests.orchestrator.checkpoint.counted import fill, odd, wrong
from tests.orchestrator.checkpoint.operations import counting

PATIENCE_S = 30
THE_END = "the end"
VICTIMS = {1: [(0,)], 2: [(0,), (1,), (0, 1)]}  # ranks -> which of them are killed
Life = list[str]  # what the first rank said: "restored 3", "saving 4", "saved 4", .. or what went wrong


@dataclass(frozen=True)
class Plan:
    """What the lives do.

    Attributes:
    directory: directory of the checkpoints.
    lives: how many.
    rows: rows of the matrix: the size of the state.
    asynchronous, keep_last: as in a run's config.
    ranks: workers of one run; above 1 one of them is killed, or the other, or both.
    template: each life has a copy of this directory, `directory`/<number>, and makes one save; the first is
        killed at its first storage operation, the second at its second .., until one comes to its end.
        Without it they continue from each other, save on and on, and are killed at random times.
    environment: variables of the lives.
    """

    directory: str
    lives: int = 50
    rows: int = 400
    asynchronous: bool = True
    keep_last: int = 2
    ranks: int = 1
    template: str | None = None
    environment: dict[str, str] = field(default_factory=dict)


def live(plans: Mapping[str, Plan]) -> dict[str, list[Life]]:
    """Returns the lives of every plan, which come one after the other, in a process of their own."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_lead, args=(plans, theirs))
    process.start()
    theirs.close()
    try:
        return json.loads(mine.recv())
    finally:
        process.join()


def check(lives: list[Life]) -> None:
    """Every life continued from what is known to have been saved, or from what was being saved."""
    known, begun = 0, 0
    for i, said in enumerate(lives):
        if not said:
            continue  # killed while it restored
        verb, step = said[0].split()
        assert verb == "restored", f"life {i}: {said}"
        assert known <= int(step) <= begun, f"life {i}: {said[0]}; before, {known} was saved of {begun}"
        known = begun = int(step)
        for line in said[1:]:
            verb, step = line.split()
            assert verb in ("saving", "saved"), f"life {i}: {line}"
            assert int(step) == known + 1, f"life {i}: {said}"
            begun, known = int(step), int(step) if verb == "saved" else known


def died_saving(lives: list[Life]) -> int:
    return sum(bool(said) and said[-1].startswith("saving") for said in lives)


def _lead(plans: Mapping[str, Plan], connection) -> None:
    fill(*odd(), 0)  # the first of its kind takes long
    connection.send(json.dumps({name: _lives(plan) for name, plan in plans.items()}))


def _lives(plan: Plan) -> list[Life]:
    os.environ |= plan.environment
    if not storage.is_local(plan.directory):
        storage._s3()  # as above; it connects nowhere yet
    rng, lives = random.Random(0), list[Life]()
    if plan.template:
        while not lives or lives[-1][-1:] != [THE_END]:
            directory = f"{plan.directory}/{len(lives)}"
            shutil.copytree(plan.template, directory)
            lives.append(_one_life(replace(plan, directory=directory), len(lives), None, ()))
        return lives
    saving_s = _time_of_a_save(plan)
    for i in range(plan.lives):
        lives.append(_one_life(plan, i, rng.uniform(0, 3 * saving_s), rng.choice(VICTIMS[plan.ranks])))
    return lives


def _time_of_a_save(plan: Plan) -> float:
    """Returns the seconds of the fastest of a few saves."""
    reading, pids = _start(replace(plan, directory=f"{plan.directory}-timed"), 0)
    times = []
    for line in reading:
        times.append((time.perf_counter(), line))
        if len(times) == 9:
            break
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    saved = [when for when, line in times if line.startswith("saved")]
    return min(b - a for a, b in pairwise(saved))


def _one_life(plan: Plan, number: int, after_s: float | None, victims: tuple[int, ...]) -> Life:
    reading, pids = _start(plan, number)
    said = [reading.readline().strip()]
    if after_s is not None:
        time.sleep(after_s)
        for rank in victims:
            os.kill(pids[rank], signal.SIGKILL)
    for pid in pids:
        _await(pid)
    said += [line.strip() for line in reading]
    return [line for line in said if line]


def _await(pid: int) -> None:
    """Waits until it ends, or is killed because it does not."""
    deadline = time.monotonic() + PATIENCE_S
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        time.sleep(0.001)
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)


def _start(plan: Plan, number: int):
    """Returns what the first rank says, and the processes."""
    read, write = os.pipe()
    pids = []
    for rank in range(plan.ranks):
        if not (pid := os.fork()):
            os.close(read)
            _be_a_run(plan, rank, number, lambda line: os.write(write, f"{line}\n".encode()))
        pids.append(pid)
    os.close(write)
    return os.fdopen(read), pids


def _be_a_run(plan: Plan, rank: int, number: int, say: Callable[[str], object]) -> NoReturn:
    """Saves until it is killed; with a template once, if that operation never came."""

    def die_or_wait(count: int, _: str) -> None:
        if not plan.template:
            time.sleep(0.003)  # so that the time of a save is spread over what it does
        elif count == number + 1:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        if plan.ranks > 1:
            store = f"file://{plan.directory}.store{number}"
            dist.init_process_group(
                "gloo", init_method=store, rank=rank, world_size=plan.ranks, timeout=timedelta(seconds=20)
            )
        patches = ExitStack()
        patches.enter_context(counting(die_or_wait))
        say = say if rank == 0 else lambda line: None
        model, optimizer = odd(plan.rows)
        checkpoints = Checkpoints(
            plan.directory, CheckpointConfig(asynchronous=plan.asynchronous, keep_last=plan.keep_last)
        )
        manifest = checkpoints.restore(model, optimizer)
        step = manifest.step if manifest else 0
        bad = wrong(model, optimizer, step) if manifest else []
        say(f"wrong at step {step}: {bad}" if bad else f"restored {step}")
        while True:
            step += 1
            fill(model, optimizer, step)
            say(f"saving {step}")
            checkpoints.save(step, model, optimizer, images=8 * step, progress={}, config={})
            fill(model, optimizer, step + 1000)  # training continues while it is written
            checkpoints.settle()
            say(f"failed at {step}" if checkpoints.failures else f"saved {step}")
            if plan.template:
                say(THE_END)
                break
    finally:
        os._exit(3)

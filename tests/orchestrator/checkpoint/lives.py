"""A run that saves step after step, is killed at a storage operation, and is started again, many times.

A parent process that has imported torch, and has neither threads nor connections, forks the lives: this takes
a hundredth of the time of importing torch. The parent is a fresh process itself.
"""

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist

from orchestrator import storage, stores
from orchestrator.checkpoint.manager import Checkpoints
from orchestrator.config import CheckpointConfig
from tests.orchestrator.checkpoint.counted import fill, odd, wrong
from tests.orchestrator.checkpoint.operations import counting

PATIENCE_S = 30
VICTIMS = {1: [(0,)], 2: [(0,), (1,), (0, 1)]}  # ranks -> groups of ranks that are killed in turn
Life = list[str]  # what the first rank said: "restored 3", "saving 4", "saved 4", .. or what went wrong


@dataclass(frozen=True)
class Plan:
    """Life n continues from what life n - 1 left, and is killed at its storage operation 1 + `stride` * n.

    ranks: workers of the run; with 2 of them either is killed, or both.
    environment: variables of the lives.
    """

    directory: str
    lives: int
    stride: int = 1
    asynchronous: bool = True
    ranks: int = 1
    environment: dict[str, str] = field(default_factory=dict)


def live(plans: Mapping[str, Plan]) -> dict[str, list[Life]]:
    """Returns the lives of every plan, in a process of their own."""
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
    """Checks that every life continued from the last step that was saved, or from the step being saved."""
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
    fill(*odd(), 0)  # the first optimiser of a process takes long
    connection.send(json.dumps({name: _lives(plan) for name, plan in plans.items()}))


def _lives(plan: Plan) -> list[Life]:
    os.environ |= plan.environment
    if not storage.is_local(plan.directory):
        stores.s3()  # making the client takes long; it does not connect yet
    return [_one_life(plan, number) for number in range(plan.lives)]


def _one_life(plan: Plan, number: int) -> Life:
    read, write = os.pipe()
    pids = []
    for rank in range(plan.ranks):
        if not (pid := os.fork()):
            os.close(read)
            _be_a_run(plan, rank, number, lambda line: os.write(write, f"{line}\n".encode()))
        pids.append(pid)
    os.close(write)
    deadline = time.monotonic() + PATIENCE_S
    for pid in pids:
        while os.waitpid(pid, os.WNOHANG) == (0, 0):
            time.sleep(0.001)
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
    with os.fdopen(read) as reading:
        return reading.read().splitlines()


def _be_a_run(plan: Plan, rank: int, number: int, say: Callable[[str], object]) -> NoReturn:
    """Restores, and saves until it is killed or another rank is gone."""
    victims = VICTIMS[plan.ranks]

    def maybe_die(count: int, _: str) -> None:
        if count == 1 + plan.stride * number and rank in victims[number % len(victims)]:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        if plan.ranks > 1:
            store = f"file://{plan.directory}.store{number}"
            dist.init_process_group(
                "gloo", init_method=store, rank=rank, world_size=plan.ranks, timeout=timedelta(seconds=20)
            )
        patches = ExitStack()
        patches.enter_context(counting(maybe_die))
        say = say if rank == 0 else lambda line: None
        model, optimizer = odd()
        checkpoints = Checkpoints(plan.directory, CheckpointConfig(asynchronous=plan.asynchronous))
        manifest = checkpoints.restore(model, optimizer)
        step = manifest.step if manifest else 0
        bad = wrong(model, optimizer, step) if manifest else []
        say(f"wrong at step {step}: {bad}" if bad else f"restored {step}")
        while True:
            step += 1
            fill(model, optimizer, step)
            say(f"saving {step}")
            checkpoints.save(step, model, optimizer, images=8 * step, progress={}, config={})
            fill(model, optimizer, step + 1000)  # training continues while the state is written
            checkpoints.settle()
            say(f"failed at {step}" if checkpoints.failures else f"saved {step}")
    finally:
        os._exit(3)

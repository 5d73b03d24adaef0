"""Signals to a command: what trains saves first, and a second signal ends the process at once."""

import os
import signal
import threading
from typing import Any

from orchestrator.runs import notice

# Ctrl-C; `ray job stop`, Kubernetes; Slurm; a terminal that is closed
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
STOP_S = 2.5  # from a signal to the forced end of what has nothing to save
GRACE_S = 25.0  # of what trains; Kubernetes kills 30 s after its signal
RAY_STOP_S = 3.0  # default of RAY_JOB_STOP_WAIT_TIME_S, from SIGTERM to SIGKILL
RAY_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # is set in a submitted job

_arrived = 0  # the signal that has arrived, if any
_grace_s = GRACE_S


def install(grace_s: float | None = None) -> None:
    """Lets the first signal stop the program: what trains saves within `grace_s` seconds, and MLflow is
    informed. A second signal ends the process at once. Is called again, without seconds, when a library has
    replaced the handlers. `nohup` ignores SIGHUP, which stays so.
    """
    global _grace_s
    _grace_s = grace_s or _grace_s
    for number in SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _stop)


def handlers() -> dict[signal.Signals, Any]:
    return {number: signal.getsignal(number) for number in SIGNALS}


def restore(before: dict[signal.Signals, Any]) -> None:
    for number, handler in before.items():
        signal.signal(number, handler)


def exit_code() -> int:
    """Returns the exit code of an interrupted command: 130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP."""
    return 128 + (_arrived or signal.SIGINT)


def default_grace_s() -> float:
    """Returns the seconds that a signal leaves: by default Kubernetes', in a submitted job Ray's."""
    if RAY_JOB not in os.environ:
        return GRACE_S
    return max(STOP_S, float(os.environ.get("RAY_JOB_STOP_WAIT_TIME_S", RAY_STOP_S)) - 0.5)


def _stop(number: int, _: Any) -> None:
    global _arrived
    if _arrived and number == signal.SIGHUP:
        return  # a shell and its terminal each send one
    if _arrived:
        os._exit(128 + number)
    _arrived = number
    saves = notice.give()
    timer = threading.Timer(_grace_s if saves else STOP_S, _end, (saves,))
    timer.daemon = True
    timer.start()
    if not saves:
        raise KeyboardInterrupt
    notice.say(f"{signal.Signals(number).name}: saving within {_grace_s:g} s; a second signal ends at once")


def _end(saves: bool) -> None:
    if saves:
        notice.say(f"Not saved within {_grace_s:g} s. Run the same command again to continue.")
    os._exit(exit_code())

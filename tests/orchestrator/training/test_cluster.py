"""What Ray prints on the terminal of a command."""

from typing import Any

from ray._private import worker

from orchestrator.training import cluster


def test_a_dead_process_is_one_sentence(monkeypatch):
    """Ray's message has 20 lines of a dump, or advice that fits every death."""
    printed: list[str] = []

    def whole(data: dict[str, Any], ignore_prefix: bool) -> None:
        printed.extend(data["lines"])

    monkeypatch.setattr(worker, "print_to_stdstream", whole)
    for _ in range(2):
        cluster._shorten_messages()
    dump = "Raylet is terminated. Termination is unexpected. Possible reasons include: ..:\n  [state-dump]"
    death = "A worker died. Worker exit detail: End of file. Some common causes include: (1) the process .."
    worker.print_to_stdstream({"lines": [dump, death]}, ignore_prefix=False)
    assert printed == [
        "Raylet is terminated. Termination is unexpected",
        "A worker died. Worker exit detail: End of file",
    ]

"""Storage whose operations are counted, each before and after it happens, and every piece that is written."""

from collections.abc import Callable
from contextlib import contextmanager
from functools import wraps
from itertools import count
from typing import Any

from orchestrator import storage

CHANGING = (
    "make_folder",
    "rename_folder",
    "flush",
    "delete",
    "delete_empty_folder",
    "write_bytes",
    "write_new",
    "abort_uploads",
)


def counting(meet: Callable[[int, str], object]) -> Callable[[], None]:
    """From now on `meet` (number from 1, what) is called at every point; the answer undoes it."""
    originals = {name: getattr(storage, name) for name in (*CHANGING, "open_to_write")}
    numbers = count(1)

    def point(what: str) -> None:
        meet(next(numbers), what)

    def watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(location: str, *args: Any, **kwargs: Any) -> Any:
            point(f"before {name} {location}")
            result = function(location, *args, **kwargs)
            point(f"after {name} {location}")
            return result

        return call

    @contextmanager
    def open_to_write(location: str):
        point(f"before opening {location}")
        with originals["open_to_write"](location) as stream:
            yield _Stream(stream, lambda: point(f"writing {location}"))
        point(f"after closing {location}")

    for name in CHANGING:
        setattr(storage, name, watched(name, originals[name]))
    storage.open_to_write = open_to_write

    def undo() -> None:
        for name, function in originals.items():
            setattr(storage, name, function)

    return undo


class _Stream:
    def __init__(self, stream: Any, meet: Callable[[], None]) -> None:
        self.stream, self.meet = stream, meet

    def write(self, content: Any) -> None:
        self.stream.write(content)
        self.meet()

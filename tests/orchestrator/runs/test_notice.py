"""A notebook's stop button: the first lets what trains save, the second ends at once."""

import signal
import threading
import time
from collections.abc import Iterator

import pytest

from orchestrator.runs import notice


@pytest.fixture(autouse=True)
def default(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Handlers as in a notebook or a script, and no training that an earlier test of this process left."""
    monkeypatch.setattr(notice, "_training", 0)
    monkeypatch.setattr(notice, "_given", False)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)  # to this thread, which handles it at once


def test_the_first_is_a_notice_and_the_second_an_interrupt() -> None:
    for _ in range(2):  # the same process may train again
        with notice.on_interrupt(), notice.saving():
            assert not notice.given()
            interrupt()
            assert notice.given()
            with pytest.raises(KeyboardInterrupt):
                interrupt()
    assert not notice.given()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_where_nothing_can_be_saved_the_first_ends() -> None:
    with notice.on_interrupt(), pytest.raises(KeyboardInterrupt):
        interrupt()


def test_a_handler_of_the_users_own_stays() -> None:
    seen: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    with notice.on_interrupt(), notice.saving():
        interrupt()
        assert not notice.given()
    assert seen == [signal.SIGINT]


def test_another_thread_changes_no_handler() -> None:
    found: list[object] = []

    def work() -> None:
        with notice.on_interrupt():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]


def test_a_request_ends_with_its_block() -> None:
    """A notebook trains again in the same process."""
    with notice.saving(), notice.on_request(lambda: True, 0.01):
        while not notice.given():
            time.sleep(0.01)
    assert not notice.given()

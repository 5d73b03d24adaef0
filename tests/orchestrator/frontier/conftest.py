from collections.abc import Iterator

import pytest
from selenium import webdriver

from tests.orchestrator.frontier.browser import chromium


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    yield from chromium(tmp_path_factory.mktemp("chromium"))

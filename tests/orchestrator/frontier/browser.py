"""A headless Chromium for tests."""

from collections.abc import Iterator
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

from tests.parts import system_program

QUIET = ("background-networking", "component-update", "gpu", "quic", "sync")
FLAGS = ["--headless=new", "--no-sandbox", "--no-first-run", *(f"--disable-{name}" for name in QUIET)]
DRAWN = """const all = [...document.querySelectorAll('.plot')];
return all.length > 0 && all.every(plot => plot.querySelector('.main-svg'))"""


def chromium(profile: Path) -> Iterator[webdriver.Chrome]:
    """Without Chromium and its driver the test skips, or fails where it must not (`tests.parts`)."""
    driver = system_program("chromedriver", "chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = system_program("chromium", "chromium")
    for flag in [*FLAGS, f"--user-data-dir={profile}", "--window-size=1100,1400"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(driver))
    yield browser
    browser.quit()


def open_page(browser: webdriver.Chrome, path: Path, text: str) -> None:
    """Returns once every plot of the page is there."""
    path.write_text(text, encoding="utf-8")
    browser.get_log("browser")
    browser.get_log("performance")
    browser.get(path.as_uri())
    WebDriverWait(browser, 60).until(lambda page: page.execute_script(DRAWN))

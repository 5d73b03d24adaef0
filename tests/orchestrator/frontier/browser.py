"""A headless Chromium for tests, where one is installed."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

BROWSER, DRIVER = "/usr/bin/chromium", "/usr/bin/chromedriver"
QUIET = ("background-networking", "component-update", "gpu", "quic", "sync")
FLAGS = ["--headless=new", "--no-sandbox", "--no-first-run", *(f"--disable-{name}" for name in QUIET)]
DRAWN = "return typeof plots === 'object' && plots.every(plot => plot.querySelector('.main-svg'))"

needs_browser = pytest.mark.skipif(
    not (shutil.which(BROWSER) and shutil.which(DRIVER)),
    reason=f"{BROWSER} or {DRIVER} is missing: install the Debian packages chromium and chromium-driver",
)


def chromium(profile: Path) -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in [*FLAGS, f"--user-data-dir={profile}", "--window-size=1100,1400"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


def open_page(browser: webdriver.Chrome, path: Path, text: str, drawn: bool = True) -> None:
    """Returns once every plot of the page is there."""
    path.write_text(text, encoding="utf-8")
    browser.get_log("browser")
    browser.get_log("performance")
    browser.get(path.as_uri())
    if drawn:
        WebDriverWait(browser, 60).until(lambda page: page.execute_script(DRAWN))

"""The page as text, and opened in a real browser."""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

from orchestrator.frontier.page import frontier_page
from orchestrator.frontier.points import Frontier, Point, Status
from orchestrator.frontier.style import TIMES, UNKNOWN

NAN = float("nan")
BROWSER, DRIVER = "/usr/bin/chromium", "/usr/bin/chromedriver"
QUIET = ("background-networking", "component-update", "gpu", "quic", "sync")
FLAGS = ["--headless=new", "--no-sandbox", "--no-first-run", *(f"--disable-{name}" for name in QUIET)]
LINK = "http://mlflow.test:5000/#/experiments/1/runs/"
EVIL = "<img src=x onerror=alert(1)>\"'&</script><script>alert(2)</script>"

needs_browser = pytest.mark.skipif(
    not (shutil.which(BROWSER) and shutil.which(DRIVER)),
    reason=f"{BROWSER} or {DRIVER} is missing: install the Debian packages chromium and chromium-driver",
)


def point(arm: str, family: str, cost: float, quality: float, status: Status = "finished") -> Point:
    return Point(
        arm=arm,
        family=family,
        cost=cost,
        quality=quality,
        size=2 if arm.endswith("2") else 1,
        run_id=f"{arm}-0123456789abcdef",
        run_url=f"{LINK}{arm}",
        status=status,
        details={"k": 2.0, "affinity": "softmax"},
    )


FRONTIER = Frontier(
    name="routers",
    cost_name="cost/train_flops_6mac",
    quality_name="val/acc1",
    points=(
        point("dense-s", "dense", 2e10, 0.80),
        point("dense-l", "dense", 3e11, 0.88),
        point("soft-1", "soft", 3e10, 0.90),
        point("soft-2", "soft", 9e10, 0.93),
        point("tc-1", "token_choice", 4e10, 0.85),
        point("ec-2", "expert_choice", 8e11, 0.95),
        point("hash-1", "hash", 5e10, 0.70),
        point("tc-burnt", "token_choice", 6e10, NAN, "diverged"),
        point("ec-young", "expert_choice", 1e9, 0.4, "running"),
        point("soft-oom", "soft", NAN, NAN, "failed"),
    ),
    rest=(point("soft-2-long", "soft", 9e11, 0.97),),
    reference=(1e12, 0.1),
)


def loads(page: str) -> set[str]:
    """Addresses that tags outside scripts would load."""
    markup = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    return set(
        re.findall(r"""<(?:script|link|img|iframe|source)[^>]*?(?:src|href)\s*=\s*["']?([^"'\s>]+)""", markup)
    )


def test_page_loads_nothing() -> None:
    page = frontier_page(FRONTIER)
    assert loads(page) == {"data:,"}
    assert not re.findall(r"<script[^>]*\bsrc\b", page)
    assert "@import" not in page.split("</style>")[0]
    assert "default-src 'none'" in page


def test_summary_counts() -> None:
    """Area: .7 x log10(50) + .1 x log10(33.3) + .03 x log10(11.1) + .02 x log10(1.25) = 1.37488."""
    text = re.sub("<[^>]+>", "", frontier_page(FRONTIER).split("<p>")[1].split("</p>")[0])
    for fact in (
        "10 trials",
        "7 finished",
        "1 failed",
        "1 diverged",
        "1 running",
        "4 on the frontier",
        "1 confirm",
    ):
        assert fact in text
    reference = f"(1.00{TIMES}10¹²,&nbsp;0.1)"
    assert f"hypervolume 1.3749 in (log10 cost, 1 - quality) to the reference {reference}" in text


def test_text_of_users_is_escaped() -> None:
    evil = replace(point(EVIL, EVIL, 1e10, 0.9), run_url="javascript:alert(3)", details={EVIL: EVIL})
    page = frontier_page(
        replace(FRONTIER, name=EVIL, cost_name=EVIL, quality_name=EVIL, points=(evil,), rest=(evil,))
    )
    assert "<img src=x" not in page
    assert "<script>alert" not in page
    assert "javascript:alert" not in page
    assert "&lt;img src=x" in page


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in [*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}", "--window-size=1100,1400"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


def open_page(browser: webdriver.Chrome, path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    browser.get_log("browser")
    browser.get_log("performance")
    browser.get(path.as_uri())


def arms(browser: webdriver.Chrome) -> list[str]:
    return [cell.text for cell in browser.find_elements(By.CSS_SELECTOR, "td.arm")]


def head(browser: webdriver.Chrome, title: str) -> WebElement:
    return browser.find_element(By.XPATH, f"//th/button[contains(., '{title}')]")


@needs_browser
def test_page_opens_without_errors_or_requests(browser: webdriver.Chrome, tmp_path: Path) -> None:
    """Seven complete points and one confirmation run are drawn, four of them connected."""
    open_page(browser, tmp_path / "page.html", frontier_page(FRONTIER))
    assert len(browser.find_elements(By.CSS_SELECTOR, ".scatterlayer .points path")) == 8
    line = browser.find_element(By.CSS_SELECTOR, ".scatterlayer path.js-line")
    assert len(re.findall("[ML]", line.get_attribute("d") or "")) == 4
    assert browser.find_element(By.CSS_SELECTOR, ".annotation-text").text.split() == ["Knee", "soft-1"]
    titles = [entry.text for entry in browser.find_elements(By.CSS_SELECTOR, ".legendtext")]
    families = ["Dense", "Soft", "Token choice", "Expert choice", "Hash"]
    assert titles == [*families, "Frontier", "Confirmation, not counted"]
    assert browser.get_log("browser") == []
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    requests = [event["params"] for event in events if event["method"] == "Network.requestWillBeSent"]
    page = (tmp_path / "page.html").as_uri()
    of_page = {request["request"]["url"] for request in requests if request["documentURL"] == page}
    assert {url for url in of_page if not url.startswith(("data:", "blob:"))} == {page}
    assert not browser.find_elements(By.CSS_SELECTOR, "[data-title^='Share']")


@needs_browser
def test_a_header_sorts_both_ways_and_keeps_unknowns_last(browser: webdriver.Chrome, tmp_path: Path) -> None:
    open_page(browser, tmp_path / "page.html", frontier_page(FRONTIER))
    assert arms(browser)[:3] == ["ec-young", "dense-s", "soft-1"]
    quality = head(browser, "Validation accuracy @1")
    quality.click()
    assert arms(browser)[:3] == ["ec-young", "hash-1", "dense-s"]
    assert set(arms(browser)[-2:]) == {"tc-burnt", "soft-oom"}
    quality.click()
    assert arms(browser)[:2] == ["soft-2-long", "ec-2"]
    assert set(arms(browser)[-2:]) == {"tc-burnt", "soft-oom"}
    head(browser, "Arm").click()
    assert arms(browser) == sorted(arms(browser))


@needs_browser
def test_rows_say_where_they_stand(browser: webdriver.Chrome, tmp_path: Path) -> None:
    open_page(browser, tmp_path / "page.html", frontier_page(FRONTIER))
    statuses = [cell.text for cell in browser.find_elements(By.CSS_SELECTOR, "td.status")]
    assert dict(zip(arms(browser), statuses, strict=True)) == {
        "dense-s": "frontier",
        "soft-1": "frontier, knee",
        "soft-2": "frontier",
        "ec-2": "frontier",
        **dict.fromkeys(("dense-l", "tc-1", "hash-1"), "dominated"),
        "tc-burnt": "diverged",
        "soft-oom": "failed",
        "ec-young": "running",
        "soft-2-long": "confirm",
    }
    failed = browser.find_element(By.CSS_SELECTOR, "tr.failed")
    assert [cell.text for cell in failed.find_elements(By.CSS_SELECTOR, ".number")] == [UNKNOWN, UNKNOWN, "1"]


@needs_browser
def test_a_click_on_a_point_opens_its_run(browser: webdriver.Chrome, tmp_path: Path) -> None:
    open_page(browser, tmp_path / "page.html", frontier_page(FRONTIER))
    browser.execute_script("window.open = (...given) => window.opened = given")
    marker = browser.find_elements(By.CSS_SELECTOR, ".scatterlayer .points path")[-1]
    webdriver.ActionChains(browser).move_to_element(marker).pause(0.3).click().perform()
    opened = WebDriverWait(browser, 5).until(lambda page: page.execute_script("return window.opened"))
    assert opened == [f"{LINK}soft-2-long", "_blank", "noopener"]
    links = browser.find_elements(By.CSS_SELECTOR, "td a")
    assert {link.get_attribute("href") for link in links} == {
        LINK + p.arm for p in FRONTIER.points + FRONTIER.rest
    }


@needs_browser
def test_copy_falls_back_to_selecting_in_a_sandboxed_frame(browser: webdriver.Chrome, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(frontier_page(FRONTIER), encoding="utf-8")
    frame = '<iframe sandbox="allow-scripts" width="1100" height="1300" src="page.html"></iframe>'
    open_page(browser, tmp_path / "frame.html", frame)
    browser.switch_to.frame(0)
    button = browser.find_element(By.CSS_SELECTOR, "tbody .copy")
    button.click()
    WebDriverWait(browser, 5).until(lambda _: button.text == "selected")
    assert browser.execute_script("return getSelection().toString()") == "ec-young-0123456789abcdef"
    assert len(browser.find_elements(By.CSS_SELECTOR, ".scatterlayer .points path")) == 8
    wide = browser.find_element(By.CSS_SELECTOR, ".wide")
    assert wide.get_property("scrollWidth") == wide.get_property("clientWidth")
    browser.switch_to.default_content()
    assert [entry for entry in browser.get_log("browser") if "clipboard" not in entry["message"]] == []


@needs_browser
@pytest.mark.parametrize(("theme", "ink"), [("light", "rgb(29, 36, 48)"), ("dark", "rgb(230, 233, 238)")])
def test_the_plot_follows_the_theme(browser: webdriver.Chrome, tmp_path: Path, theme: str, ink: str) -> None:
    open_page(browser, tmp_path / "page.html", frontier_page(FRONTIER))
    media = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    style = "return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]"
    for text, attribute in ((".xtitle", "fill"), (".legendtext", "fill"), ("h1", "color")):
        colour = partial(browser.execute_script, style, text, attribute)
        WebDriverWait(browser, 5).until(lambda _, colour=colour: colour() == ink)


@needs_browser
@pytest.mark.parametrize("num_points", [0, 1])
def test_page_of_few_points(browser: webdriver.Chrome, tmp_path: Path, num_points: int) -> None:
    points = (point(EVIL, EVIL, 1.0, 0.5),) * num_points
    few = replace(FRONTIER, name=EVIL, points=points, rest=())
    open_page(browser, tmp_path / "page.html", frontier_page(few))
    assert browser.get_log("browser") == []
    assert arms(browser) == [EVIL] * num_points
    note = browser.find_element(By.CSS_SELECTOR, ".annotation-text").text
    assert EVIL in note if num_points else note == "No finished trial with a known cost and quality"

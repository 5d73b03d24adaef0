"""The page opened in a real browser."""

import json
import re
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

from orchestrator.frontier.page import frontier_page
from orchestrator.frontier.style import UNKNOWN
from tests.orchestrator.frontier.browser import DRAWN, open_page
from tests.orchestrator.frontier.samples import EVIL, FRONTIER, LINK, many, point

pytestmark = pytest.mark.smoke

MARKERS = "#plot0 .scatterlayer .points path"


def arms(browser: webdriver.Chrome) -> list[str]:
    return [cell.text for cell in browser.find_elements(By.CSS_SELECTOR, "td.arm")]


def head(browser: webdriver.Chrome, title: str) -> WebElement:
    return browser.find_element(By.XPATH, f"//th/button[contains(., '{title}')]")


def check(browser: webdriver.Chrome, label: str) -> None:
    browser.find_element(By.XPATH, f"//label[contains(., '{label}')]/input").click()


def wait_for_markers(browser: webdriver.Chrome, count: int, plot: int = 0) -> None:
    css = MARKERS.replace("0", str(plot))
    WebDriverWait(browser, 10).until(lambda page: len(page.find_elements(By.CSS_SELECTOR, css)) == count)


def errors(browser: webdriver.Chrome) -> list[str]:
    return [entry["message"] for entry in browser.get_log("browser") if "clipboard" not in entry["message"]]


def test_page_opens_without_errors_or_requests(browser: webdriver.Chrome, tmp_path: Path) -> None:
    """Seven complete points, a diverged and a confirmation run are drawn; four of them are connected."""
    open_page(browser, tmp_path / "page.html", frontier_page(FRONTIER))
    wait_for_markers(browser, 9)
    line = browser.find_element(By.CSS_SELECTOR, ".scatterlayer path.js-line")
    assert len(re.findall("[ML]", line.get_attribute("d") or "")) == 4
    assert browser.find_element(By.CSS_SELECTOR, ".annotation-text").text.split() == ["Knee", "soft-1"]
    key = [entry.text for entry in browser.find_elements(By.CSS_SELECTOR, "#key span")]
    marks = ["Frontier", "Dense alone", "Confirmation, not counted", "Diverged, on the cost axis"]
    assert key == ["1", "2", *marks]
    assert errors(browser) == []
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    requests = [event["params"] for event in events if event["method"] == "Network.requestWillBeSent"]
    page = (tmp_path / "page.html").as_uri()
    of_page = {request["request"]["url"] for request in requests if request["documentURL"] == page}
    assert {url for url in of_page if not url.startswith(("data:", "blob:"))} == {page}
    assert not browser.find_elements(By.CSS_SELECTOR, "[data-title^='Share']")


def test_a_header_sorts_both_ways_and_keeps_unknowns_last(browser: webdriver.Chrome, tmp_path: Path) -> None:
    open_page(browser, tmp_path / "page.html", frontier_page(FRONTIER))
    assert arms(browser)[:3] == ["ec-young", "ec-early", "dense-s"]
    quality = head(browser, "Validation accuracy @1")
    quality.click()
    assert arms(browser)[:3] == ["ec-young", "hash-1", "dense-s"]
    assert set(arms(browser)[-2:]) == {"tc-burnt", "soft-oom"}
    quality.click()
    assert arms(browser)[:2] == ["ec-early", "soft-2-long"]
    assert set(arms(browser)[-2:]) == {"tc-burnt", "soft-oom"}
    head(browser, "Arm").click()
    assert arms(browser) == sorted(arms(browser))
    head(browser, "Status").click()
    statuses = [cell.text for cell in browser.find_elements(By.CSS_SELECTOR, "td.status")]
    assert statuses == sorted(statuses)


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
        "ec-early": "stopped",
        "soft-2-long": "confirm",
    }
    failed = browser.find_element(By.CSS_SELECTOR, "tr.failed")
    assert [cell.text for cell in failed.find_elements(By.CSS_SELECTOR, ".number")] == [UNKNOWN, UNKNOWN, "1"]


def test_filters_act_on_plots_and_table(browser: webdriver.Chrome, tmp_path: Path) -> None:
    found = replace(FRONTIER, panels=("cost/device_s",))
    open_page(browser, tmp_path / "page.html", frontier_page(found))
    count = partial(browser.find_element, By.CSS_SELECTOR, "#filters output")
    assert count().text == "12 of 12 shown"
    wait_for_markers(browser, 9, plot=1)
    check(browser, "Soft")
    assert [arm for arm in arms(browser) if arm.startswith("soft")] == []
    wait_for_markers(browser, 6)
    wait_for_markers(browser, 6, plot=1)
    check(browser, "Soft")
    check(browser, "Diverged")
    assert "tc-burnt" not in arms(browser)
    wait_for_markers(browser, 8)
    check(browser, "Diverged")
    check(browser, "Frontier only")
    assert arms(browser) == ["dense-s", "soft-1", "soft-2", "ec-2"]
    assert count().text == "4 of 12 shown"
    wait_for_markers(browser, 4)
    check(browser, "Frontier only")
    browser.find_element(By.CSS_SELECTOR, "input[type=search]").send_keys("SOFT-2 capacity")
    assert arms(browser) == ["soft-2", "soft-2-long"]
    wait_for_markers(browser, 2)
    assert errors(browser) == []


def test_each_familys_frontier_is_on_a_switch(browser: webdriver.Chrome, tmp_path: Path) -> None:
    """The frontier, that of dense, and those of four other families."""
    open_page(browser, tmp_path / "page.html", frontier_page(FRONTIER))
    lines = partial(browser.find_elements, By.CSS_SELECTOR, "#plot0 path.js-line")
    assert len(lines()) == 2
    check(browser, "Frontier of each family")
    WebDriverWait(browser, 5).until(lambda _: len(lines()) == 6)


def test_hover_tells_and_a_click_opens_the_run(browser: webdriver.Chrome, tmp_path: Path) -> None:
    open_page(browser, tmp_path / "page.html", frontier_page(FRONTIER))
    browser.execute_script("window.open = (...given) => window.opened = given")
    marker = browser.find_elements(By.CSS_SELECTOR, MARKERS)[-2]  # the last diverged: another axis, on top
    webdriver.ActionChains(browser).move_to_element(marker).pause(0.3).perform()
    label = WebDriverWait(browser, 5).until(
        lambda page: page.find_element(By.CSS_SELECTOR, "#plot0 .hoverlayer .hovertext").text
    )
    for fact in (
        "soft-2-long",
        "confirm",
        "Validation accuracy @1: 0.9700",
        "affinity: softmax",
        "run soft-2-long-",
    ):
        assert fact in label
    webdriver.ActionChains(browser).click().perform()
    opened = WebDriverWait(browser, 5).until(lambda page: page.execute_script("return window.opened"))
    assert opened == [f"{LINK}soft-2-long", "_blank", "noopener"]
    links = browser.find_elements(By.CSS_SELECTOR, "td a")
    assert {link.get_attribute("href") for link in links} == {
        LINK + p.arm for p in FRONTIER.points + FRONTIER.rest
    }


def test_copy_falls_back_to_selecting_in_a_sandboxed_frame(browser: webdriver.Chrome, tmp_path: Path) -> None:
    """Every seed's run is copied, one a line; each has its link."""
    seeds = replace(FRONTIER.points[8], runs=(("seed-2", f"{LINK}2"), ("seed-3", None)))
    found = replace(FRONTIER, points=(*FRONTIER.points[:8], seeds, *FRONTIER.points[9:]))
    (tmp_path / "page.html").write_text(frontier_page(found), encoding="utf-8")
    frame = '<iframe sandbox="allow-scripts" width="1100" height="1300" src="page.html"></iframe>'
    open_page(browser, tmp_path / "frame.html", frame, drawn=False)
    browser.switch_to.frame(0)
    WebDriverWait(browser, 60).until(lambda page: page.execute_script(DRAWN))
    wait_for_markers(browser, 9)
    assert [a.get_attribute("href") for a in browser.find_elements(By.CSS_SELECTOR, ".seeds a")] == [
        f"{LINK}2"
    ]
    button = browser.find_element(By.CSS_SELECTOR, "tbody .copy")
    button.click()
    WebDriverWait(browser, 5).until(lambda _: button.text == "selected")
    chosen = browser.execute_script("return getSelection().toString()")
    assert chosen.split() == ["ec-young-0123456789abcdef", "seed-2", "seed-3"]
    browser.switch_to.default_content()
    assert errors(browser) == []


@pytest.mark.parametrize(("theme", "ink"), [("light", "rgb(29, 36, 48)"), ("dark", "rgb(230, 233, 238)")])
def test_the_page_follows_the_theme(browser: webdriver.Chrome, tmp_path: Path, theme: str, ink: str) -> None:
    open_page(browser, tmp_path / "page.html", frontier_page(replace(FRONTIER, panels=("cost/device_s",))))
    media = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    style = "return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]"
    for text, attribute in (("#plot0 .xtitle", "fill"), ("#plot1 .xtitle", "fill"), ("h1", "color")):
        colour = partial(browser.execute_script, style, text, attribute)
        WebDriverWait(browser, 5).until(lambda _, colour=colour: colour() == ink)


@pytest.mark.parametrize("num_points", [0, 1])
def test_page_of_few_points(browser: webdriver.Chrome, tmp_path: Path, num_points: int) -> None:
    points = (point(EVIL, EVIL, 1.0, 0.5),) * num_points
    few = replace(FRONTIER, name=EVIL, points=points, rest=())
    open_page(browser, tmp_path / "page.html", frontier_page(few))
    assert errors(browser) == []
    assert arms(browser) == [EVIL] * num_points
    note = browser.find_element(By.CSS_SELECTOR, ".annotation-text").text
    assert EVIL in note if num_points else note == "No finished trial with a known cost and quality"


def test_a_thousand_trials(browser: webdriver.Chrome, tmp_path: Path) -> None:
    """All are drawn, found by the filters, and listed, though not all at once. Seconds go to the log."""
    page = frontier_page(many(1000))
    begin = time.perf_counter()
    open_page(browser, tmp_path / "page.html", page)
    opened = time.perf_counter() - begin
    drawn = [p for p in many(1000).points if p.status in ("finished", "diverged")]
    wait_for_markers(browser, len(drawn))
    assert browser.find_element(By.CSS_SELECTOR, "#filters output").text == "1000 of 1000 shown"
    assert len(browser.find_elements(By.CSS_SELECTOR, "tbody tr")) == 200
    browser.find_element(By.ID, "more").click()
    assert len(browser.find_elements(By.CSS_SELECTOR, "tbody tr")) == 400
    timed = (
        "const begin = performance.now(); {}; document.body.offsetHeight; return performance.now() - begin"
    )
    sort = browser.execute_script(timed.format("headRow.cells[0].firstChild.click()"))
    search = "document.querySelector('input[type=search]')"
    act = f"{search}.value = 'soft'; {search}.dispatchEvent(new Event('input'))"
    found = browser.execute_script(timed.format(act))
    wait_for_markers(browser, sum(p.family == "soft" for p in drawn))
    assert errors(browser) == []
    print(f"1,000 trials: open {opened:.2f} s, sort {sort:.0f} ms, filter the table {found:.0f} ms")

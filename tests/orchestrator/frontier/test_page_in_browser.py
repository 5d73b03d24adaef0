"""The page opened in a real browser."""

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

from orchestrator.frontier.frontier import Frontier
from orchestrator.frontier.page import frontier_page
from tests.orchestrator.frontier.browser import open_page
from tests.orchestrator.frontier.samples import ACC, EVIL, FRONTIER, LINK, SECONDS, point

pytestmark = pytest.mark.smoke

TWO_COSTS = replace(FRONTIER, reference={**FRONTIER.reference, SECONDS: 1e3})


def arms(browser: webdriver.Chrome) -> list[str]:
    return [cell.text for cell in browser.find_elements(By.CSS_SELECTOR, "td.arm") if cell.is_displayed()]


def click_head(browser: webdriver.Chrome, title: str) -> None:
    browser.find_element(By.XPATH, f"//th/button[contains(., '{title}')]").click()


def check(browser: webdriver.Chrome, value: str) -> None:
    browser.find_element(By.CSS_SELECTOR, f"#filters input[value='{value}']").click()


def marks(browser: webdriver.Chrome, plot: int = 0) -> list[WebElement]:
    return browser.find_elements(By.CSS_SELECTOR, f"#plot{plot} .scatterlayer .points path")


def wait_for_marks(browser: webdriver.Chrome, count: int, plot: int = 0) -> None:
    WebDriverWait(browser, 10).until(lambda page: len(marks(page, plot)) == count)


def errors(browser: webdriver.Chrome) -> list[str]:
    return [entry["message"] for entry in browser.get_log("browser")]


def test_page_opens_without_errors_or_requests(browser: webdriver.Chrome, tmp_path: Path) -> None:
    """Seven complete points, a diverged and a retrained one are drawn; four of them are connected."""
    open_page(browser, tmp_path / "page.html", frontier_page(FRONTIER))
    wait_for_marks(browser, 9)
    line = browser.find_element(By.CSS_SELECTOR, ".scatterlayer path.js-line")
    corners = re.findall("[MHV]", line.get_attribute("d") or "")
    assert corners == ["M", "H", "V", "H", "V", "H", "V"], "a staircase over four points"
    assert browser.find_element(By.CSS_SELECTOR, ".annotation-text").text == "Knee"
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
    click_head(browser, "Validation accuracy @1")
    assert arms(browser)[:3] == ["ec-young", "hash-1", "dense-s"]
    assert set(arms(browser)[-2:]) == {"tc-burnt", "soft-oom"}
    click_head(browser, "Validation accuracy @1")
    assert arms(browser)[:2] == ["ec-early", "soft-2-long"]
    assert set(arms(browser)[-2:]) == {"tc-burnt", "soft-oom"}
    click_head(browser, "Arm")
    assert arms(browser) == sorted(arms(browser))


def test_filters_act_on_plots_and_table(browser: webdriver.Chrome, tmp_path: Path) -> None:
    open_page(browser, tmp_path / "page.html", frontier_page(TWO_COSTS))
    listed = partial(browser.find_element, By.CSS_SELECTOR, "#filters output")
    lines = partial(browser.find_elements, By.CSS_SELECTOR, "#plot0 path.js-line")
    assert (listed().text, len(lines())) == ("12 of 12 listed", 2)
    wait_for_marks(browser, 9, plot=1)
    check(browser, "soft")
    assert [arm for arm in arms(browser) if arm.startswith("soft")] == []
    wait_for_marks(browser, 6)
    wait_for_marks(browser, 6, plot=1)
    check(browser, "soft")
    check(browser, "diverged")
    assert "tc-burnt" not in arms(browser)
    wait_for_marks(browser, 8)
    for role in ("diverged", "dominated", "retrained", "running", "stopped", "failed"):
        check(browser, role)
    check(browser, "diverged")
    assert arms(browser) == ["dense-s", "soft-1", "soft-2", "ec-2"]
    assert listed().text == "4 of 12 listed"
    wait_for_marks(browser, 4)
    check(browser, "family")
    WebDriverWait(browser, 5).until(lambda _: len(lines()) == 6)
    browser.find_element(By.CSS_SELECTOR, "input[type=search]").send_keys("SOFT-2 capacity")
    assert arms(browser) == ["soft-2"]
    assert errors(browser) == []


def test_the_reader_chooses_the_cost_of_the_first_plot(browser: webdriver.Chrome, tmp_path: Path) -> None:
    """Also one that has no plot of its own; the diverged point and the retrained one have no such cost."""
    sizes = {p.arm: {"infer/file_mb": 1e9 / p.cost} for p in FRONTIER.points if p.status == "finished"}
    points = tuple(replace(p, costs=sizes.get(p.arm, {})) for p in FRONTIER.points)
    open_page(browser, tmp_path / "page.html", frontier_page(replace(FRONTIER, points=points)))
    wait_for_marks(browser, 9)
    axis = browser.find_element(By.CSS_SELECTOR, "select[aria-label=Axis]")
    title = partial(browser.find_element, By.CSS_SELECTOR, "#plot0 .xtitle")
    before = title().text
    axis.send_keys("Size of the file")
    wait_for_marks(browser, 7)
    assert title().text == "Size of the file (MB)"
    axis.send_keys(Keys.HOME)
    wait_for_marks(browser, 9)
    assert title().text == before
    assert errors(browser) == []


def test_hover_tells_and_a_click_opens_the_run(browser: webdriver.Chrome, tmp_path: Path) -> None:
    open_page(browser, tmp_path / "page.html", frontier_page(FRONTIER))
    browser.execute_script("window.open = (...given) => window.opened = given")
    wait_for_marks(browser, 9)
    marker = marks(browser)[-2]  # the last one is the diverged point: another axis, on top
    webdriver.ActionChains(browser).move_to_element(marker).pause(0.3).perform()
    label = WebDriverWait(browser, 5).until(lambda page: page.find_element(By.ID, "hover").text)
    for fact in ("soft-2-long", "retrained", "Validation accuracy @1: 0.9700", "affinity: softmax"):
        assert fact in label
    webdriver.ActionChains(browser).click().perform()
    opened = WebDriverWait(browser, 5).until(lambda page: page.execute_script("return window.opened"))
    assert opened == [f"{LINK}soft-2-long", "_blank", "noopener"]
    links = browser.find_elements(By.CSS_SELECTOR, "td a")
    assert {link.get_attribute("href") for link in links} == {LINK + p.arm for p in FRONTIER.all_points}


def test_the_page_and_its_hover_texts_fit_a_narrow_window(browser: webdriver.Chrome, tmp_path: Path) -> None:
    long = point("a-very-long-name-" * 9, "soft", 9.9e11, 0.99, details={f"n{i}": "1" for i in range(20)})
    cost = {"infer/ms_p95": 1.0}  # whose title is long
    points = tuple(replace(each, costs=cost) for each in (*FRONTIER.points, long))
    open_page(browser, tmp_path / "page.html", frontier_page(replace(FRONTIER, points=points)))
    window = {"width": 390, "height": 700, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", window)
    plot = "return document.querySelector('#plot0 .main-svg').getBoundingClientRect().right"
    WebDriverWait(browser, 5).until(lambda page: page.execute_script(plot) < 390)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
    for marker in marks(browser):
        browser.execute_script("arguments[0].scrollIntoView()", marker)
        webdriver.ActionChains(browser).move_to_element(marker).pause(0.2).perform()
        box = browser.find_element(By.ID, "hover")
        assert box.is_displayed()
        left, top, right, bottom = browser.execute_script(
            "const box = arguments[0].getBoundingClientRect();"
            "return [box.left, box.top, box.right, box.bottom]",
            box,
        )
        assert left >= 0 <= top
        assert right <= 390
        assert bottom <= 700
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_the_printed_page_is_light_and_as_wide_as_a_sheet(browser: webdriver.Chrome, tmp_path: Path) -> None:
    open_page(browser, tmp_path / "page.html", frontier_page(TWO_COSTS))
    media = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    state = """return [[...document.querySelectorAll('.main-svg')].every(svg => svg.clientWidth <= 700),
        document.querySelector('.wide').scrollWidth <= 700, getComputedStyle(document.body).backgroundColor,
        getComputedStyle(document.querySelector('.xtitle')).fill, filters.checkVisibility()]"""
    printed = [True, True, "rgb(255, 255, 255)", "rgb(29, 36, 48)", False]
    shown = [False, False, "rgb(20, 23, 28)", "rgb(230, 233, 238)", True]
    WebDriverWait(browser, 5).until(lambda page: page.execute_script(state) == shown)
    browser.execute_script("dispatchEvent(new Event('beforeprint'))")
    assert browser.execute_script(state) == printed
    browser.execute_script("dispatchEvent(new Event('afterprint'))")
    WebDriverWait(browser, 5).until(lambda page: page.execute_script(state) == shown)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {})


def test_the_page_follows_the_theme(browser: webdriver.Chrome, tmp_path: Path) -> None:
    open_page(browser, tmp_path / "page.html", frontier_page(TWO_COSTS))
    style = "return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]"
    for theme, ink in (("dark", "rgb(230, 233, 238)"), ("light", "rgb(29, 36, 48)")):
        media = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        for text, attribute in (("#plot1 .xtitle", "fill"), ("h1", "color")):
            colour = partial(browser.execute_script, style, text, attribute)
            WebDriverWait(browser, 5).until(lambda _, colour=colour, ink=ink: colour() == ink)


@pytest.mark.parametrize("num_points", [0, 1])
def test_page_of_few_points(browser: webdriver.Chrome, tmp_path: Path, num_points: int) -> None:
    points = (point(EVIL, EVIL, 1.0, 0.5, run_url="javascript:alert(1)"),) * num_points
    reference = {EVIL: 10.0, ACC: 0.1}
    few = Frontier(name=EVIL, cost_name=EVIL, quality_name=ACC, points=points, reference=reference)
    open_page(browser, tmp_path / "page.html", frontier_page(few))
    assert errors(browser) == []
    assert arms(browser) == [EVIL] * num_points
    note = browser.find_element(By.CSS_SELECTOR, ".annotation-text").text
    assert note == ("Knee" if num_points else "No finished trial with a known cost and quality")

"""The report in a real browser, headless Chromium: nothing is asked of a network, nothing is cut off, both themes."""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from test_report import make, make_plain

from tlt_hpc.cli.main import main

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
if not (BROWSER and DRIVER) and "CI" not in os.environ:  # CI installs them: there it would be a gap
    pytest.skip("needs chromium and chromedriver (Debian: chromium, chromium-driver)", allow_module_level=True)

WIDTHS = (360, 1440)
CUT_OFF = """
const shown = e => e.getClientRects().length && getComputedStyle(e).visibility !== 'hidden';
const wide = document.documentElement.clientWidth;
const scrolls = e => { for (let p = e; p; p = p.parentElement)
    if (['auto', 'scroll'].includes(getComputedStyle(p).overflowX)) return true; return false; };
const bad = [];
for (const e of document.querySelectorAll('body *')) {
    if (!shown(e) || scrolls(e) || e.closest('defs')) continue;
    const own = [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
    if (!own) continue;
    const box = e.getBoundingClientRect(), svg = e.closest('svg');
    const text = e.textContent.trim().slice(0, 60);
    if (box.left < -1 || box.right > wide + 1) bad.push('leaves the page: ' + text);
    if (svg) { const room = svg.getBoundingClientRect();
        if (box.left < room.left - 2 || box.right > room.right + 2 || box.top < room.top - 2 ||
            box.bottom > room.bottom + 2) bad.push('leaves its figure: ' + text);
    } else if (e.clientWidth && e.scrollWidth > e.clientWidth + 1) bad.push('is wider than its place: ' + text);
}
return bad;
"""
LETTERS = """
return [...document.querySelectorAll('svg text')].filter(e => e.getClientRects().length).map(e => {
    const svg = e.ownerSVGElement;
    return parseFloat(getComputedStyle(e).fontSize) * svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
});
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report with every section."""
    folder = tmp_path_factory.mktemp("report")
    run, plain = make(folder / "a-run-of-a-long-name-20261122-134959"), make_plain(folder / "plain")
    assert main(["report", str(run.path), "--against", str(plain.path)]) == 0
    return run.path / "report.html"


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    options = Options()
    assert BROWSER and DRIVER, "install chromium and chromium-driver"
    options.binary_location = BROWSER
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
                     "--disable-background-networking", "--window-size=1440,900"):  # fmt: skip
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


def open_page(browser: webdriver.Chrome, page: Path, width: int, theme: str) -> None:
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    feature = {"name": "prefers-color-scheme", "value": theme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    for log in ("browser", "performance"):
        browser.get_log(log)  # what was before is not this page's
    browser.get(page.as_uri())
    browser.execute_script("document.querySelectorAll('details').forEach(e => e.open = true)")


def requests(browser: webdriver.Chrome) -> list[str]:
    """Addresses that the page asked for."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]


def picture(browser: webdriver.Chrome) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The whole page as it looks, [height, width, 3]."""
    size = browser.execute_script(
        "return [document.documentElement.clientWidth, document.documentElement.scrollHeight]"
    )
    clip = {"x": 0, "y": 0, "width": size[0], "height": size[1], "scale": 1}
    shot = browser.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(shot["data"]))).convert("RGB"))


@pytest.mark.parametrize("theme", ("light", "dark"))
@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_stands_alone_and_nothing_is_cut_off(
    browser: webdriver.Chrome, page: Path, width: int, theme: str
) -> None:
    open_page(browser, page, width, theme)
    assert browser.get_log("browser") == [], "the console has something to say"
    asked = [url for url in requests(browser) if not url.startswith("data:")]
    assert asked == [page.as_uri()], "the page asks for something"
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width, "it scrolls sideways"
    assert browser.execute_script(CUT_OFF) == []
    letters = browser.execute_script(LETTERS)
    assert len(letters) > 60 and min(letters) >= 7.0, "letters of the figures, in pixels"
    pixels = picture(browser)
    light = pixels.mean(2)
    ground = np.median(light)
    assert ground > 240 if theme == "light" else ground < 30
    assert (np.abs(light - ground) > 60).mean() > 0.02, "there is something to see"

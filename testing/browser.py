"""Headless Chromium, for what a user looks at. Debian: apt-get install chromium chromium-driver."""

from contextlib import contextmanager
from shutil import which

import pytest
from selenium import webdriver


LAPTOP, PHONE = (1366, 900), (480, 800)
# Elements whose content does not fit into them, and cannot be scrolled to
CLIPPED = """
return [...document.querySelectorAll('article *, section *')].filter(e => {
  const style = getComputedStyle(e);
  return e.clientWidth && e.scrollWidth > e.clientWidth + 1 && !['auto', 'scroll'].includes(style.overflowX)
    && style.display != 'inline';
}).map(e => e.tagName + ': ' + e.textContent.slice(0, 60));
"""


@contextmanager
def chromium(size: tuple[int, int] = LAPTOP):
    """A browser window of `size`; its console is read with `errors`."""
    if not (which("chromium") and which("chromedriver")):
        pytest.skip("no chromium and chromedriver on the path")
    options = webdriver.ChromeOptions()
    for word in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--window-size={size[0]},{size[1]}",
    ):
        options.add_argument(word)
    options.binary_location = which("chromium")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(which("chromedriver")))
    try:
        yield browser
    finally:
        browser.quit()


def look_at(browser, url: str) -> None:
    """Open a page and require that nothing is wrong with it: no console error, no picture that failed to load, nothing
    wider than the window, nothing clipped.
    """
    browser.get(url)
    errors = [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert errors == []
    run = browser.execute_script
    assert run("return [...document.images].filter(i => !i.complete || !i.naturalWidth).map(i => i.alt)") == []
    assert run("return document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0
    assert run(CLIPPED) == []

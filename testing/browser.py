"""Headless Chromium, for what a user looks at. Debian: apt-get install chromium chromium-driver."""

from contextlib import contextmanager
from shutil import which

import pytest
from selenium import webdriver


LAPTOP, TABLET, PHONE = SIZES = (1366, 900), (768, 1024), (400, 860)
SCHEMES = ("light", "dark")
# Elements whose content does not fit into them, and cannot be scrolled to; letters outside of their picture
CLIPPED = """
const boxes = [...document.querySelectorAll('article *, body > main *')].filter(e => {
  const style = getComputedStyle(e);
  return e.clientWidth && e.scrollWidth > e.clientWidth + 1 && !['auto', 'scroll'].includes(style.overflowX)
    && style.display != 'inline' && !e.ownerSVGElement;
});
const letters = [...document.querySelectorAll('main svg text')].filter(e => {
  const [own, all] = [e.getBoundingClientRect(), e.ownerSVGElement.getBoundingClientRect()];
  return own.width && (own.left < all.left - 1 || own.right > all.right + 1 || own.top < all.top - 1
    || own.bottom > all.bottom + 1);
});
return [...boxes, ...letters].map(e => e.tagName + ': ' + e.textContent.slice(0, 60));
"""
# Text whose contrast with what is behind it is below WCAG's AA, 4.5
FAINT = """
const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
const rgba = color => {
  canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
  return canvas.getImageData(0, 0, 1, 1).data;
};
const luminance = color => {
  const [r, g, b] = [...rgba(color)].slice(0, 3).map(v => v / 255)
    .map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
  return .2126 * r + .7152 * g + .0722 * b;
};
const ground = e => {
  for (; e; e = e.parentElement) {
    const color = getComputedStyle(e).backgroundColor;
    if (rgba(color)[3] == 255) return color;
  }
  return 'white';
};
return [...document.querySelectorAll('main *')].filter(e =>
  [...e.childNodes].some(n => n.nodeType == 3 && n.textContent.trim()) && e.getClientRects().length
).map(e => {
  const style = getComputedStyle(e);
  const [a, b] = [e instanceof SVGElement ? style.fill : style.color, ground(e)].map(luminance);
  return [(Math.max(a, b) + .05) / (Math.min(a, b) + .05), e.textContent.slice(0, 40)];
}).filter(([contrast]) => contrast < 4.5);
"""


@contextmanager
def chromium(size: tuple[int, int] = LAPTOP):
    """Yield a browser window of `size`; `errors` reads its console."""
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


def show(browser, size: tuple[int, int], scheme: str) -> None:
    """Give the next pages a window of `size` and a reader who prefers the colour `scheme`."""
    window = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", window)
    preferred = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": preferred})


def unfold(browser) -> None:
    """Open all that is folded."""
    browser.execute_script("document.querySelectorAll('details').forEach(each => each.open = true)")


def look_at(browser, url: str | None = None) -> None:
    """Open a page, or stay, and require that nothing is wrong with it: no console error, no picture that failed to
    load, nothing wider than the window, nothing clipped.
    """
    if url:
        browser.get(url)
    errors = [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert errors == []
    run = browser.execute_script
    assert run("return [...document.images].filter(i => !i.complete || !i.naturalWidth).map(i => i.alt)") == []
    assert run("return document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0
    assert run(CLIPPED) == []

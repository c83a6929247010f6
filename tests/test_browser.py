"""What `look_at` is there to see."""

import pytest

from testing.browser import FAINT, chromium, look_at


BROKEN = {
    "<section><div style='width:9999px'>wide</div></section>": "scrollWidth",
    (
        "<section><div style='width:50px;overflow:hidden;white-space:nowrap'>a label that is cut</div></section>"
    ): "CLIPPED",
    "<section><img src='missing.png' alt='gone'></section>": "errors == ",
    "<section><svg width='50' height='50'><text x='30' y='20'>letters</text></svg></section>": "CLIPPED",
    "<section><script>throw new Error('boom')</script></section>": "errors == ",
}


def test_a_page_with_something_wrong_is_not_right(tmp_path):
    with chromium() as browser:
        for number, (body, check) in enumerate(BROKEN.items()):
            page = tmp_path / f"{number}.html"
            page.write_text(f"<!doctype html><main>{body}</main>")
            with pytest.raises(AssertionError) as error:
                look_at(browser, page.as_uri())
            assert check in str(error.traceback[-1].statement), body
        page.write_text("<!doctype html><main><section>fine</section></main>")
        look_at(browser, page.as_uri())


def test_faint_text_is_found(tmp_path):
    """#767676 on white has the least contrast that AA allows, 4.54; #777777 has 4.48."""
    page = tmp_path / "page.html"
    page.write_text(
        "<!doctype html><main style='background: white'>"
        "<p style='color: #767676'>seen</p><p style='color: #777'>faint</p>"
        "<svg><text y='9' style='fill: #777'>letters</text></svg>"
        "<div style='background: #777; color: #777'><b style='background: black; color: white'>seen</b>gone</div>"
    )
    with chromium() as browser:
        browser.get(page.as_uri())
        found = {text: round(contrast, 2) for contrast, text in browser.execute_script(FAINT)}
    assert found == {"faint": 4.48, "letters": 4.48, "seengone": 1.0}

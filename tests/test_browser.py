"""What `look_at` is there to see."""

import pytest

from testing.browser import chromium, look_at


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

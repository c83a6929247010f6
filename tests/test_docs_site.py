"""The documentation site: built without a warning, and looked at in a browser."""

import ast
import json
import os
import re
import subprocess
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

import trl_fp8
from benchmarks.table import depth
from testing.browser import FAINT, LAPTOP, PHONE, chromium, look_at, show


ROOT = Path(__file__).parents[1]


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    return folder


def redirected() -> dict[str, str]:
    """Return the pages that moved, with the page that each leads to now."""
    config = (ROOT / "mkdocs.yml").read_text()
    return dict(re.findall(r"(?m)^        (\w+\.md): (\S+)$", config.partition("redirect_maps:")[2]))


def test_every_page_is_in_the_navigation_and_loads_nothing_from_elsewhere(site):
    moved = {page.replace(".md", ".html") for page in redirected()}
    pages = {path.name for path in site.glob("*.html")} - {"404.html"} - moved
    assert pages == {f"{path.stem}.html" for path in (ROOT / "docs").glob("*.md")}
    for page in pages:
        text = (site / page).read_text()
        assert not re.search(r'<(?:script|img|link rel="stylesheet")[^>]+(?:src|href)="https?:', text), page
        assert str(ROOT) not in text


def test_old_addresses_lead_to_the_pages_that_took_their_place(site):
    for old, new in redirected().items():
        assert not (ROOT / "docs" / old).exists(), f"{old} is a page, and redirected"
        address = new if "://" in new else new.replace(".md", ".html")
        assert f'href="{address}"' in (site / old.replace(".md", ".html")).read_text(), old
        page, _, heading = address.partition("#")
        assert not heading or f'id="{heading}"' in (site / page).read_text(), new
        assert "://" not in new or (ROOT / new.partition("/main/")[2]).is_file(), new


def test_what_the_package_exports_is_on_the_page_of_the_api(site):
    page = (site / "configuration.html").read_text()
    assert [name for name in trl_fp8.__all__ if not re.search(rf'id="trl_fp8\.[\w.]+\.{name}"', page)] == []


def test_pages_are_right_in_a_browser(site):
    """Over HTTP, as the search does not work from files; all of them in the dark on a phone."""
    handler = partial(QuietHandler, directory=site)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, chromium(LAPTOP) as browser:
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        for page in ("index", "quickstart", "comparison", "configuration", "evidence", "troubleshooting"):
            look_at(browser, f"{address}/{page}.html")
            assert browser.find_element("css selector", "h1").text
        show(browser, PHONE, "dark")
        for path in (ROOT / "docs").glob("*.md"):
            look_at(browser, f"{address}/{path.stem}.html")
            assert browser.execute_script(FAINT) == [], path.stem
        server.shutdown()


def test_troubleshooting_quotes_what_the_package_says():
    said = list(texts(ROOT / "src"))
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    tables = re.findall(r"(?m)^\| the error (?:or warning )?says .*\n\|---.*\n((?:\|.*\n)+)", page)
    quoted = [row.split("`")[1] for table in tables for row in table.splitlines()]
    assert len(tables) == 2 and len(quoted) > 20
    for quote in quoted:
        pattern = re.compile(".*".join(re.escape(part) for part in quote.split("...")), re.DOTALL)
        assert any(pattern.search(text) for text in said), quote


def texts(folder):
    """All strings in the sources below `folder`; what an f-string fills in is left out."""
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            yield "".join(str(part.value) for part in parts if isinstance(part, ast.Constant))


def test_the_table_of_depth_is_that_of_the_measurement():
    measured = json.loads((ROOT / "benchmarks" / "results" / "depth_cpu.json").read_text())
    lines = (ROOT / "docs" / "how_it_works.md").read_text().splitlines()
    assert [line for line in lines if re.match(r"\| (random|trained) \| \d", line)] == list(depth(measured))[2:]


def test_a_link_to_a_file_that_does_not_exist_fails_the_build(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# Home\n\n[gone](../src/gone.py)\n")
    (tmp_path / "mkdocs.yml").write_text(
        f"site_name: x\nrepo_url: https://example.org/x\nhooks: [{ROOT}/docs/hooks/site_links.py]\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode != 0 and "index.md links to ../src/gone.py" in done.stderr


def headings(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the site make them."""
    found = set()
    for heading in re.findall(r"(?m)^#+ (.*)$", re.sub(r"(?s)```.*?```", "", text)):
        words = re.sub(r"[^\w\s-]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)).strip().lower()
        found |= {re.sub(r"\s", "-", words), re.sub(r"[-\s]+", "-", words)}
    return found


def broken_links(path: Path) -> list[str]:
    """Return the links of a page in the repository whose file or heading does not exist."""
    broken = []
    for target, heading in re.findall(
        r"\]\(([^)#\s:]*)(?:#([^)\s]*))?\)", re.sub(r"(?s)```.*?```", "", path.read_text())
    ):
        file = path.parent / target if target else path
        if not file.exists() or (heading and file.suffix == ".md" and heading not in headings(file.read_text())):
            broken.append(f"{target}#{heading}")
    return broken


def test_no_link_in_the_repository_is_broken(tmp_path):
    """Pages off the site, and headings that they or the site link to, too; mkdocs sees neither."""
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    pages = [ROOT / name for name in listed.split() if (ROOT / name).exists()]
    assert len(pages) > 20
    assert {path.name: broken for path in pages if (broken := broken_links(path))} == {}
    (tmp_path / "a.md").write_text(
        "# A b\n[one](#a-b) [two](#a-c) [three](b.md) [four](a.md#a-b) [five](https://x.org/#y)\n"
    )
    assert broken_links(tmp_path / "a.md") == ["#a-c", "b.md#"]

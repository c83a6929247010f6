"""MkDocs hook: links that leave docs/ are followed in the repository as they are, and on the site through `repo_url`.

A target that does not exist is a warning that names page and link; `mkdocs build --strict` fails on it.
"""

import logging
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.pages import Page


LINK = re.compile(r"(?<=\]\()\.\./[^)#\s]+")
log = logging.getLogger("mkdocs.hooks.site_links")  # below "mkdocs", where strict mode counts warnings


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, **_: object) -> str:
    docs = Path(config.docs_dir).resolve()
    repository, folder = docs.parent, (docs / page.file.src_uri).parent

    def on_site(link: re.Match[str]) -> str:
        target = (folder / link[0]).resolve()
        if target.is_relative_to(docs):
            return link[0]
        if not (target.exists() and target.is_relative_to(repository)):
            log.warning(f"docs/{page.file.src_uri} links to {link[0]}, which is not in the repository.")
            return config.repo_url
        kind = "tree" if target.is_dir() else "blob"
        return f"{config.repo_url.rstrip('/')}/{kind}/main/{target.relative_to(repository).as_posix()}"

    return LINK.sub(on_site, markdown)


def on_post_page(output: str, **_: object) -> str:
    """Without this mark the theme does not ask api.github.com for the repository's stars."""
    return output.replace(' data-md-component="source"', "")

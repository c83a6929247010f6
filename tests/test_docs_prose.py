"""The language of the pages: short sentences, without overused phrases. `make lint` runs proselint besides."""

import re
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MOST_PAGES, MOST_WORDS = 18, 28_000
WORDS_IN_A_SENTENCE = 15  # on average; the pages have 9 to 14
# phrase -> what to write
OVERUSED = {
    r"(?:is|are|was|were) told": "says, prints, shows",
    r"as ever": "nothing",
    r"alike": "equal, the same",
    r"by what": "where, how",
    r"by now": "nothing",
    r"for good": "permanently",
    r"tell from|told from": "distinguish from",
    r"nobody knows": "is not measured",
    r"wants a": "needs a",
    r"without a word": "silently",
    r"as it is said|what is said of": "a noun",
    r"who (?:is|are) to": "must",
}


def prose(text: str) -> str:
    """Return the text of a page without code, addresses and what is generated."""
    text = re.sub(r"(?s)<!-- generated.*?<!-- end -->", "", text)
    text = re.sub(r"(?s)```.*?```", "", text)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return re.sub(r"`[^`\n]*`", "code", text)


def overused(text: str) -> list[str]:
    """Return the overused phrases in `text`, each with what to write instead."""
    found = []
    for phrase, instead in OVERUSED.items():
        for match in re.finditer(rf"(?i)\b(?:{phrase})\b", " ".join(prose(text).split())):
            found.append(f"{match[0]!r}: write {instead}")
    return found


def sentence_lengths(text: str) -> list[int]:
    """Return the number of words of each sentence outside of tables and headings."""
    text = re.sub(r"(?m)^(?:\||#|!\[|:::|    ).*$", "\n", prose(text))
    paragraphs = re.split(r"\n\s*\n|\n(?=- |\d+\. )", text)
    sentences = [
        each for paragraph in paragraphs for each in re.split(r"(?<=[.:;?!])\s+", " ".join(paragraph.split()))
    ]
    return [len(each.split()) for each in sentences if len(each.split()) > 2]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_has_short_sentences_and_no_overused_phrase(path):
    text = path.read_text()
    assert overused(text) == []
    lengths = sentence_lengths(text)
    assert sum(lengths) / len(lengths) <= WORDS_IN_A_SENTENCE


def test_what_is_overused_is_found_in_prose_alone():
    assert overused("No loss was\ntold, as ever.") == [
        "'was told': write says, prints, shows",
        "'as ever': write nothing",
    ]
    assert overused("`as ever` [as said](as ever) \n```\nalike\n```\n") == []
    assert sentence_lengths(
        "# Head of it\n\nOne two three. Four five six seven: eight nine ten.\n\n| a b c d |\n"
    ) == [3, 4, 3]


def test_there_are_few_pages_and_few_words():
    """What is generated does not count, nor what becomes docstrings in the site (`::: name` and its options)."""
    uncounted = r"(?ms)<!-- generated.*?<!-- end -->|<!-- flags.*?<!-- end of flags -->|^:::[^\n]*\n(?:    [^\n]*\n)*"
    words = sum(len(re.sub(uncounted, "", path.read_text()).split()) for path in PAGES)
    assert len(PAGES) <= MOST_PAGES and words <= MOST_WORDS, (len(PAGES), words)

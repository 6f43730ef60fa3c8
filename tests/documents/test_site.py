"""The documents as a site: built strictly, whole without a network, links and anchors that lead somewhere."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from docs.generate_api import TARGET, render
from tests.documents.blocks import PAGES, ROOT

OUTSIDE = ("CHANGELOG.md", "SECURITY.md", "benchmarks/README.md", "benchmarks/RESULTS.md")
LINKED = (*PAGES, *(ROOT / name for name in OUTSIDE))


def test_the_api_reference_is_fresh() -> None:
    assert TARGET.read_text() == render(), "run `python docs/generate_api.py`"


def test_every_call_field_and_value_has_a_comment() -> None:
    assert [line for line in render().splitlines() if line.startswith("| `") and line.endswith("|  |")] == []


class Fetched(HTMLParser):
    """What a browser fetches to show a page (not what a reader may click)."""

    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self.urls += [given[name] or "" for name in ("src", "srcset") if name in given]
        if tag == "link" and given.get("rel") not in ("canonical", "next", "prev", "edit"):
            self.urls.append(given.get("href") or "")


def test_the_site_builds_strictly_and_fetches_nothing_from_elsewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path)]
    build = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert build.returncode == 0, build.stdout + build.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 25
    for page in pages:
        reader = Fetched()
        reader.feed(page.read_text())
        assert reader.urls
        assert [url for url in reader.urls if re.match(r"(https?:)?//", url)] == [], page


def anchors_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them: lower case, no punctuation, hyphens for spaces."""
    tokens = MarkdownIt().enable("table").parse(page.read_text())
    titles = [tokens[place + 1] for place, token in enumerate(tokens) if token.type == "heading_open"]
    names = ["".join(part.content for part in title.children or ()) for title in titles]
    return {re.sub(r"[^\w\- ]", "", name.lower()).strip().replace(" ", "-") for name in names}


def links_of(page: Path) -> list[str]:
    tokens = MarkdownIt().enable("table").parse(page.read_text())
    parts = [part for token in tokens for part in token.children or ()]
    targets = [part.attrGet("href") or part.attrGet("src") for part in parts if part.type in ("link_open", "image")]
    return [str(target) for target in targets]


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.name)
def test_links_lead_to_files_and_anchors_that_exist(page: Path) -> None:
    for target in links_of(page):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        if anchor:
            assert anchor in anchors_of(file), target

"""The fenced blocks of documents, and the marks before them that send some to a slow group.

Must not know: how a block is run.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
SHELLS = ("sh", "bash", "console")
RUNNABLE = (*SHELLS, "python")
MARK = re.compile(r"<!--\s*test: slow ([a-z]+)\s*-->\s*")


class BadMark(Exception):
    """A comment that begins with "test" and is no mark, or stands before nothing that could be run."""


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block. `line` is that of its first line of code, from 1; `group` None: the default suite."""

    page: str
    line: int
    language: str
    code: str
    group: str | None = None

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def is_runnable(self) -> bool:
        return self.language in RUNNABLE


def blocks_of(page: Path) -> list[Block]:
    """All fenced blocks of a page in order. Raises BadMark."""
    return list(blocks_in(page.read_text(), page.relative_to(ROOT).as_posix()))


def blocks_in(text: str, page: str) -> Iterator[Block]:
    """The fenced blocks of a text; a mark belongs to the block right after it."""
    mark: Token | None = None
    for token in MarkdownIt().parse(text):
        if token.type == "fence":
            assert token.map is not None
            block = Block(page, token.map[0] + 2, token.info.partition(" ")[0], token.content, _group(mark, page))
            if mark is not None and not block.is_runnable:
                raise BadMark(f"{block.place}: a mark before a block that is not run")
            yield block
            mark = None
            continue
        if mark is not None:
            raise BadMark(f"{page}: {mark.content.strip()!r} stands before no block")
        if re.search(r"<!--\s*test\b", token.content) and token.type == "html_block":
            mark = token
    if mark is not None:
        raise BadMark(f"{page}: {mark.content.strip()!r} stands before no block")


def _group(mark: Token | None, page: str) -> str | None:
    if mark is None:
        return None
    found = MARK.fullmatch(mark.content)
    if found is None:
        raise BadMark(f"{page}: {mark.content.strip()!r} is no mark; as in <!-- test: slow load -->")
    return found[1]

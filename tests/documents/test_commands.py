"""Every fenced command of the documents runs: here, page by page, or in a slow group that is named before it."""

import importlib.util
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.documents.blocks import MARK, PAGES, ROOT, RUNNABLE, SHELLS, BadMark, Block, blocks_in, blocks_of
from tests.documents.conftest import MakePlace
from tests.documents.groups import GROUPS
from tests.documents.substitutions import COMPUTING

DEFAULT = {page: [each for each in blocks_of(page) if each.is_runnable and each.group is None] for page in PAGES}
SLOW = [each for page in PAGES for each in blocks_of(page) if each.group is not None]
TIMEOUT_S = 150
# First words of commands; a block in no language that begins with one would be run by nobody.
PROGRAMS = (
    "tokenwire|tokenwire-engine|tokenwire-tokenizer|make|python|python3|pip|curl|docker|kubectl|pytest|smg|locust"
)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", [page for page in PAGES if DEFAULT[page]], ids=lambda page: page.name)
def test_the_commands_of_a_page_run_as_written(page: Path, make_place: MakePlace) -> None:
    blocks = DEFAULT[page]
    with make_place(blocks, 1, simulated=page.name not in COMPUTING) as place:
        for block in blocks:
            place.run(block, TIMEOUT_S)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_command_hides_in_a_block_without_a_language(page: Path) -> None:
    for block in blocks_of(page):
        if block.language not in RUNNABLE:
            assert not re.search(rf"^(\$ )?({PROGRAMS}) ", block.code, re.MULTILINE), block.place


@pytest.mark.parametrize("block", SLOW, ids=lambda block: block.place)
def test_slow_blocks_belong_to_a_group_and_are_whole(block: Block) -> None:
    """What can be known of them in no time: the shell can read them, their modules and scripts exist."""
    assert block.group in GROUPS, block.place
    if block.language in SHELLS:
        read = subprocess.run(["bash", "-n"], input=block.code, capture_output=True, text=True, check=False)
        assert read.returncode == 0, f"{block.place}: {read.stderr}"
        for module in re.findall(r"\bpython -m ([\w.]+)", block.code):
            assert importlib.util.find_spec(module), f"{block.place}: {module}"
    else:
        compile(block.code, block.place, "exec")


def test_modules_and_test_files_named_within_a_line_exist() -> None:
    for page in PAGES:
        for code in re.findall(r"`((?:python -m|pytest) [^`]+)`", page.read_text()):
            words = shlex.split(code)
            assert words[0] == "pytest" or importlib.util.find_spec(words[2]), f"{page.name}: {code}"
            for path in (word.partition("::")[0] for word in words if word.startswith("tests/")):
                assert (ROOT / path).exists() or path.endswith("..."), f"{page.name}: {code}"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<!-- test: slow -->\n```sh\nls\n```\n", "is no mark"),
        ("<!-- test: skip -->\n\n```sh\nls\n```\n", "is no mark"),
        ("<!-- test: slow load -->\n\nwords\n\n```sh\nls\n```\n", "stands before no block"),
        ("<!-- test: slow load -->\n```toml\na = 1\n```\n", "that is not run"),
        ("<!-- test: slow load -->\n", "stands before no block"),
    ],
)
def test_a_mark_that_is_none_is_an_error(text: str, reason: str) -> None:
    with pytest.raises(BadMark, match=reason):
        list(blocks_in(text, "page"))


@pytest.mark.parametrize(
    ("language", "code", "said"),
    [
        ("sh", "true\nfalse\ntrue\n", "page:7: exit code 1"),
        ("sh", "tokenwire health no.such.service\n", "exit code 1"),
        ("sh", "tokenwire-engine --no-such-flag\n", "exit code 2"),
        ("sh", "pip install 'tokenwire[no-such-extra]'\n", "no extra no-such-extra"),
        ("console", "$ echo one\none\n$ echo two; echo three\ntwo\n...four\n", "three"),
    ],
)
def test_a_command_that_fails_is_seen(language: str, code: str, said: str, make_place: MakePlace) -> None:
    block = Block("page", 7, language, code)
    with make_place([block], 1) as place, pytest.raises(AssertionError, match=said):
        place.run(block, TIMEOUT_S)


def test_a_program_that_fails_is_seen_and_variables_last(make_place: MakePlace) -> None:
    with make_place([], 1) as place:
        place.run(Block("page", 1, "sh", "export COLOUR=blue"), TIMEOUT_S)
        assert place.run(Block("page", 3, "console", "$ echo $COLOUR\nb..."), TIMEOUT_S) == "blue\n"
        place.run(Block("page", 5, "python", "x = 1"), TIMEOUT_S)
        with pytest.raises(ZeroDivisionError) as caught:
            place.run(Block("page", 9, "python", "y = x\n1 / 0"), TIMEOUT_S)
    assert caught.traceback[-1].lineno == 9  # the page's tenth line, counted from 0


def test_blocks_have_their_lines_and_groups() -> None:
    text = "# A\n\n```python\nx = 1\n```\n\n- in a list\n\n  <!-- test: slow load -->\n  ```sh\n  ls\n  ```\n"
    first, second = blocks_in(text, "page")
    assert (first.line, first.language, first.code, first.group) == (4, "python", "x = 1\n", None)
    assert (second.line, second.language, second.code, second.group) == (11, "sh", "ls\n", "load")
    assert MARK.fullmatch("<!-- test: slow load -->")

"""The commands of slow groups, page by page (`pytest -m slow tests/documents -k load`). What lacks something fails."""

from pathlib import Path

import pytest

from tests.documents.blocks import PAGES, blocks_of
from tests.documents.conftest import MakePlace
from tests.documents.groups import GROUPS

PARTS = sorted({(block.group, page) for page in PAGES for block in blocks_of(page) if block.group is not None})
BLOCK_TIMEOUT_S = 3600


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("group", "page"),
    [pytest.param(group, page, id=f"{group}-{page.name}", marks=GROUPS[group].marks) for group, page in PARTS],
)
def test_the_slow_commands_of_a_page_run(group: str, page: Path, make_place: MakePlace) -> None:
    missing = GROUPS[group].needs()
    assert not missing, f"{group} ({GROUPS[group].why}) needs {missing}"
    blocks = [block for block in blocks_of(page) if block.group == group]
    with make_place(blocks, 5) as place:
        for block in blocks:
            print(place.run(block, BLOCK_TIMEOUT_S))

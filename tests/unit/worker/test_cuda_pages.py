"""Blocks as pages: every slot of a block is found at its place of a page, whatever the two sizes."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_service.worker.cuda.pages import PageRule, Pages


@settings(deadline=None)
@given(per_block=st.integers(1, 6), page_size=st.integers(1, 5), data=st.data())
def test_a_token_is_found_through_both_tables(per_block: int, page_size: int, data: st.DataObject) -> None:
    pages = Pages(per_block * page_size, page_size)
    pool = torch.arange(7 * pages.block_size).view(7, pages.block_size, 1)
    row = st.lists(st.integers(0, 6), min_size=3, max_size=3)
    blocks = torch.tensor(data.draw(st.lists(row, min_size=1, max_size=3)), dtype=torch.int32)
    tables, paged = pages.tables(blocks), pages.of_pool(pool)
    assert tables.dtype == torch.int32
    assert tables.is_contiguous()
    assert paged.data_ptr() == pool.data_ptr()
    by_block = pool[blocks.long()].flatten(1)
    by_page = paged[tables.long()].flatten(1)
    assert torch.equal(by_block, by_page)


@settings(deadline=None)
@given(multiple=st.integers(1, 64), largest=st.none() | st.integers(1, 300), block_size=st.integers(1, 600))
def test_the_largest_page_that_fits(multiple: int, largest: int | None, block_size: int) -> None:
    fitting = [
        size
        for size in range(1, block_size + 1)
        if block_size % size == 0 and size % multiple == 0 and (largest is None or size <= largest)
    ]
    assert PageRule(multiple, largest).page_size(block_size) == max(fitting, default=None)


def test_the_kernel_inside_torch_wants_pages_of_256() -> None:
    rule = PageRule(256)
    assert [rule.page_size(size) for size in (16, 128, 255, 256, 384, 512)] == [None, None, None, 256, None, 512]

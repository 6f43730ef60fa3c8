"""What must always hold between requests, blocks and the prefix index.

Must not know: plans' contents, sampling, torch, the clock.
"""

from collections import Counter
from collections.abc import Collection

from engine_service.core.block_pool import BlockPool
from engine_service.core.fairness import FairShares
from engine_service.core.prefix_index import BlockIndex
from engine_service.core.request import Request, RequestStatus
from engine_service.core.roster import Roster


def check_state(
    pool: BlockPool,
    index: BlockIndex,
    roster: Roster,
    live: Collection[Request],
    holders: Collection[Request],
) -> None:
    """AssertionError with the numbers. `holders` are all requests that may hold blocks, live or not."""
    _check_pool(pool, index)
    _check_references(pool, index, holders)
    for request in holders:
        _check_writes(pool, request)
    _check_places(roster, live, holders)
    for request in live:
        _check_counters(request)


def check_nothing_held(pool: BlockPool, roster: Roster) -> None:
    """AssertionError when blocks or places are taken; for an engine without requests. O(1)."""
    assert pool.num_used == 0, f"idle, but {pool.num_used:,} of {pool.num_blocks:,} blocks are held"
    placed = (len(roster.running), len(roster.waiting), roster.leaving)
    assert placed == (0, 0, 0), f"idle, but (running, waiting, leaving) requests are {placed}"


def check_shares(shares: FairShares, roster: Roster, live: Collection[Request]) -> None:
    """AssertionError when what the tenants are said to have differs from what their requests are."""
    waiting = roster.waiting.all()
    tenants = shares.tenants()
    assert shares.total_weight == sum(tenant.weight for tenant in tenants)
    assert {id(request.account.tenant) for request in live} <= {id(tenant) for tenant in tenants}
    for tenant in tenants:
        queue = [request for request in waiting if request.account.tenant is tenant]
        tokens = sum(request.prompt_length for request in queue)
        running = sum(request.account.tenant is tenant for request in roster.running)
        counted = (tenant.waiting, tenant.waiting_tokens, tenant.running)
        assert counted == (len(queue), tokens, running), f"tenant {tenant.name!r}: {counted}, not {len(queue), tokens}"
    assert roster.waiting.num_tenants == sum(tenant.waiting > 0 for tenant in tenants)
    for priority, lane in roster.waiting.lanes():
        shown = sum(map(len, lane.requests.values()))
        held = lane.num_waiting - shown
        assert held >= 0, f"priority {priority}: {shown} requests in order, {lane.num_waiting} wait"


def _check_pool(pool: BlockPool, index: BlockIndex) -> None:
    free = pool.free_blocks()
    referenced = [block for block in range(pool.num_blocks) if pool.references(block)]
    both = [block for block in referenced if block in free]
    assert not both, f"blocks {both} are free and referenced"
    assert len(free) + len(referenced) == pool.num_blocks, (
        f"{len(free)} free + {len(referenced)} referenced blocks are not {pool.num_blocks}"
    )
    indexed = set(index.blocks())
    cached = {block for block, has_content in free.items() if has_content}
    assert cached == indexed & free.keys(), f"free blocks with content {cached}, indexed {indexed & free.keys()}"
    assert len(cached) == pool.num_cached, f"{len(cached)} cached blocks, counted {pool.num_cached}"
    flags = list(free.values())
    assert flags == sorted(flags), "a free block with content stands before one without"


def _check_references(pool: BlockPool, index: BlockIndex, holders: Collection[Request]) -> None:
    tables = Counter(block for request in holders for block in request.block_table)
    for block in range(pool.num_blocks):
        count = pool.references(block)
        assert count == tables[block], f"block {block}: {count} references, in {tables[block]} block tables"
        if count > 1 and not index.has_block(block):
            owners = [request for request in holders if block in request.block_table]
            _check_shared(block, owners)


def _check_shared(block: int, owners: list[Request]) -> None:
    """A block that nobody else can find is shared by samples of one prompt only, and holds nothing but prompt."""
    families = {id(request.family) for request in owners}
    assert len(families) == 1, f"private block {block} is shared by requests of {len(families)} submissions"
    assert owners[0].family is not None, f"private block {block} has {len(owners)} owners"
    for request in owners:
        end = (request.block_table.index(block) + 1) * _block_size(request)
        assert end < request.prompt_length, (
            f"shared block {block} ends at {end} of {request.prompt_length} prompt tokens"
        )


def _check_writes(pool: BlockPool, request: Request) -> None:
    """What is computed next goes to blocks that nobody else reads."""
    if request.block_table:
        shared = [
            b for b in request.block_table[request.num_computed // _block_size(request) :] if pool.references(b) > 1
        ]
        assert not shared, f"request {request.request_id} would write to the shared blocks {shared}"


def _block_size(request: Request) -> int:
    return request.num_slots // len(request.block_table)


def _check_places(roster: Roster, live: Collection[Request], holders: Collection[Request]) -> None:
    waiting = roster.waiting.all()
    placed = {request.request_id for request in [*roster.running, *waiting]}
    assert len(placed) == len(roster.running) + len(waiting), "a request is in two places"
    assert placed == {request.request_id for request in live}, "live requests and queues differ"
    _check_families(live)
    ranks = [request.rank for request in roster.running]
    assert ranks == sorted(ranks), f"running requests are not in order of rank: {ranks}"
    tokens = sum(request.prompt_length for request in waiting)
    assert tokens == roster.waiting.num_tokens, f"{tokens} tokens wait, counted {roster.waiting.num_tokens}"
    leaving = [r for r in holders if r.status is not RequestStatus.RUNNING and r.in_flight]
    assert len(leaving) == roster.leaving, f"{len(leaving)} requests are leaving, counted {roster.leaving}"
    for request in holders:
        holds = request.status is RequestStatus.RUNNING or request.in_flight > 0
        assert holds or not request.block_table, (
            f"request {request.request_id} ({request.status.value}) keeps {len(request.block_table)} blocks"
        )


def _check_families(live: Collection[Request]) -> None:
    for family in {id(r.family): r.family for r in live if r.family is not None}.values():
        members = {request.request_id for request in live if request.family is family}
        assert members == {request.request_id for request in [*family.waiting, *family.running]}
        wanted = family.num_admissible()
        assert family.num_shown == wanted, f"{family.num_shown} samples of a prompt may be admitted, not {wanted}"


def _check_counters(request: Request) -> None:
    known = len(request.token_ids) + request.num_sampling
    order = (0, request.num_computed, request.num_scheduled, known, request.length_limit)
    assert list(order) == sorted(order), f"request {request.request_id}: computed, scheduled, known: {order}"
    assert request.num_scheduled <= request.num_slots, (
        f"request {request.request_id}: {request.num_scheduled} positions in {request.num_slots} slots"
    )

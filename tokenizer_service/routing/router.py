"""Chooses the engine replica of a request by what is known of each: cached prefixes, load, memory.

Must not know: how a replica is reached, text. `choice.py` decides; here are the figures it decides by.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tokenizer_service.engines.block_digests import block_digests, salt_of
from tokenizer_service.engines.connection import EngineConnection
from tokenizer_service.engines.messages import AdapterInfo, ModelInfo, ReplicaStream, TokenSink, TokenSubmission
from tokenizer_service.engines.prefix_map import PrefixMap
from tokenizer_service.engines.refusal import Refusal, RefusalCode
from tokenizer_service.routing.choice import Candidate, Draw, Policy, Reason, choose
from tokenizer_service.routing.expected import ExpectedBlocks

# Longer prompts are compared by so many leading tokens: 2 ms of hashing at most.
MAX_COMPARED_TOKENS = 32_768
MAX_MAP_BLOCKS = 1_000_000
# So much more work an engine may have than others before one of these reads an adapter that it has in memory.
ADAPTER_READ_TOKENS = 4_096


def _nobody(_reason: Reason) -> None:
    """Counts nothing."""


@dataclass(slots=True)
class Router:
    """Over the replicas that `connections` holds at the time. `observe` is told why each request went where."""

    connections: Sequence[EngineConnection]
    policy: Policy = Policy.PREFIX
    prefixes: PrefixMap = field(default_factory=lambda: PrefixMap(MAX_MAP_BLOCKS))
    expected: ExpectedBlocks = field(default_factory=ExpectedBlocks)
    dice: random.Random = field(default_factory=random.SystemRandom)
    clock: Callable[[], float] = time.monotonic
    observe: Callable[[Reason], None] = _nobody
    _turn: int = 0

    @property
    def num_connected(self) -> int:
        return sum(connection.is_connected for connection in self.connections)

    def model(self) -> ModelInfo | None:
        """The model that all connected replicas serve, with the shortest of their contexts; None when there is none."""
        models = (c.model for c in self.connections if c.is_connected and c.model is not None)
        return min(models, key=lambda model: model.max_model_len, default=None)

    def fingerprint(self, adapter: str) -> str | None:
        """Of the content that a connected replica has under this name: of the first one, where contents differ."""
        for connection in self.connections:
            if connection.is_connected and connection.model is not None:
                found = connection.model.adapters.get(adapter)
                if found is not None:
                    return found.fingerprint
        return None

    @property
    def adapter_names(self) -> "AdapterNames":
        return AdapterNames(self)

    def num_with(self, adapter: str) -> int:
        """Connected replicas that have an adapter of this name."""
        return sum(c.is_connected and c.model is not None and adapter in c.model.adapters for c in self.connections)

    def adapters(self) -> dict[str, str]:
        """Name -> fingerprint of those that a connected replica has; where contents differ, of the first one."""
        found: dict[str, str] = {}
        for connection in self.connections:
            if connection.is_connected and connection.model is not None:
                for name, adapter in connection.model.adapters.items():
                    found.setdefault(name, adapter.fingerprint)
        return found

    def submit(
        self, submission: TokenSubmission, sink: TokenSink, avoid: frozenset[str] = frozenset()
    ) -> ReplicaStream | Refusal:
        """Hands a generation to a replica; to one that `avoid` names (addresses) only if there is no other."""
        usable = [connection for connection in self.connections if connection.is_usable]
        if submission.adapter and usable:
            usable = _with_adapter(usable, submission)
            if not usable:
                return no_adapter(submission.adapter)
        usable = [connection for connection in usable if connection.address not in avoid] or usable
        if not usable:
            return no_engine()
        names = _BlockNames(submission)
        cached = self._cached_blocks(usable, names)
        candidates = [_candidate(c, blocks) for c, blocks in zip(usable, cached, strict=True)]
        self._turn += 1
        draw = Draw(self.dice.randrange, self._turn)
        place, reason = choose(self.policy, candidates, names.num_tokens, draw)
        chosen = usable[place]
        stream = chosen.submit(submission, sink, candidates[place].cached_tokens)
        if not isinstance(stream, Refusal):
            self.observe(reason)
            self._expect(chosen, names, cached[place])
        return stream

    def _cached_blocks(self, usable: Sequence[EngineConnection], names: "_BlockNames") -> list[int]:
        """Leading blocks of the prompt that each has or soon will have; nothing is hashed for a single one."""
        sizes = {c.block_size for c in usable if c.blocks is not None and c.block_size > 0}
        if self.policy is not Policy.PREFIX or len(usable) < 2 or not sizes:
            return [0] * len(usable)
        soon = self.expected.current(self.clock())
        found = {size: self.prefixes.longest(names.of(size), soon) for size in sizes}
        return [
            0 if c.blocks is None or c.block_size not in found else found[c.block_size].get(c.blocks.bit, 0)
            for c in usable
        ]

    def _expect(self, chosen: EngineConnection, names: "_BlockNames", cached_blocks: int) -> None:
        if chosen.blocks is not None and (digests := names.made(chosen.block_size)):
            self.expected.add(chosen.blocks.bit, digests[cached_blocks:], self.clock())


@dataclass(frozen=True, slots=True)
class AdapterNames:
    """Those that a connected replica has now; asked for one by one, without making a list of all."""

    router: Router

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.router.fingerprint(name) is not None


class _BlockNames:
    """The digests of one prompt, and of what is resumed, made when asked for: engines may differ in block size."""

    def __init__(self, submission: TokenSubmission) -> None:
        resumed = submission.resumed_token_ids
        token_ids = [*submission.token_ids, *resumed] if resumed else submission.token_ids
        self.num_tokens = len(token_ids)
        self._token_ids = token_ids[: MAX_COMPARED_TOKENS + 1]
        self._salt = salt_of(submission.cache_salt, submission.adapter_fingerprint)
        self._made: dict[int, list[bytes]] = {}

    def of(self, block_size: int) -> list[bytes]:
        if block_size not in self._made:
            self._made[block_size] = block_digests(self._token_ids, block_size, self._salt)
        return self._made[block_size]

    def made(self, block_size: int) -> list[bytes]:
        """Nothing where nobody asked."""
        return self._made.get(block_size, [])


def _adapter_of(connection: EngineConnection, submission: TokenSubmission) -> AdapterInfo | None:
    """The adapter that the submission names, if the replica has it with the same content."""
    found = None if connection.model is None else connection.model.adapters.get(submission.adapter)
    return found if found is not None and found.fingerprint == submission.adapter_fingerprint else None


def _with_adapter(usable: Sequence[EngineConnection], submission: TokenSubmission) -> list[EngineConnection]:
    """Those that have it; of these only the ones with it in memory, as long as they are not much busier than others."""
    found = [(c, adapter) for c in usable if (adapter := _adapter_of(c, submission)) is not None]
    least = min((c.outstanding_tokens for c, _ in found), default=0)
    ready = [c for c, adapter in found if adapter.in_memory and c.outstanding_tokens <= least + ADAPTER_READ_TOKENS]
    return ready or [c for c, _ in found]


def _candidate(connection: EngineConnection, cached_blocks: int) -> Candidate:
    load, size = connection.load, connection.block_size
    return Candidate(
        cached_tokens=cached_blocks * size,
        queued_tokens=load.all_queued_tokens,
        streams=load.all_streams,
        outstanding_tokens=connection.outstanding_tokens,
        # Cached blocks that nobody uses are room, and the ones that this request would share count on both sides.
        room_tokens=None if load.told is None or size < 1 else load.told.room_blocks * size,
    )


def no_adapter(name: str) -> Refusal:
    text = f"no engine that takes requests has the adapter {name!r} now"
    return Refusal(RefusalCode.UNAVAILABLE, text, retry_after_s=1.0)


def no_engine() -> Refusal:
    return Refusal(RefusalCode.UNAVAILABLE, "no engine is connected", retry_after_s=1.0)

"""Requests wait for their adapters in bounds; adapters leave memory least recently used first, never while in use."""

from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import pytest

from engine_service.core.outcome import Refusal, RefusalCode
from engine_service.core.sampling import SamplingParams
from engine_service.loop.adapter_desk import MAX_WAIT_S, MAX_WAITING, AdapterDesk
from engine_service.loop.adapter_shelf import AdapterShelf
from engine_service.loop.grammar_desk import Decided
from engine_service.loop.messages import LoadAdapter, Submit, UnloadAdapter


@dataclass(frozen=True)
class Content:
    fingerprint: str
    rank: int = 4


@dataclass
class World:
    """A desk over files that a test reads by hand, and a worker that notes what it holds."""

    places: int = 2
    files: dict[str, Content] = field(default_factory=dict)
    held: dict[int, Content] = field(default_factory=dict)
    reads: list[tuple[str, "Future[Content]"]] = field(default_factory=list)
    too_large: set[str] = field(default_factory=set)
    wakes: int = 0
    last_id: int = 0

    def __post_init__(self) -> None:
        self.shelf = AdapterShelf(self, self.places)
        self.desk = AdapterDesk(self.shelf, self.read, self.wake)  # type: ignore[arg-type]

    def install_adapter(self, number: int, adapter: Content) -> None:
        assert number not in self.held
        if adapter.fingerprint in self.too_large:
            raise MemoryError
        self.held[number] = adapter
        assert len(self.held) <= self.places

    def drop_adapter(self, number: int) -> None:
        del self.held[number]

    def wake(self) -> None:
        self.wakes += 1

    def read(self, folder: str) -> "Future[Content]":
        self.reads.append((folder, Future()))
        return self.reads[-1][1]

    def finish_reads(self) -> None:
        for folder, future in self.reads:
            if folder in self.files:
                future.set_result(self.files[folder])
            else:
                future.set_exception(ValueError("no files"))
        self.reads.clear()

    def add(self, *names: str) -> None:
        for name in names:
            self.files[name] = Content(f"of {name}")
            self.desk.add(name, name, self.files[name])

    def ask(self, name: str, now: float = 0.0, **changes: object) -> Submit | Refusal | None:
        command = Submit(self.last_id + 1, (1,), SamplingParams(max_tokens=1, seed=0), adapter=name)
        command = replace(command, **changes)
        self.last_id = command.request_id + command.samples - 1
        return self.desk.accept(command, now)

    def decide(self, now: float = 0.0) -> list[Decided]:
        return list(self.desk.decided(now))

    def held_contents(self) -> set[str]:
        return {content.fingerprint for content in self.held.values()}


def admitted(answer: object) -> Submit:
    assert isinstance(answer, Submit), answer
    return answer


def refused(answer: object, code: RefusalCode) -> None:
    assert isinstance(answer, Refusal), answer
    assert answer.code is code


def test_one_in_memory_goes_on_at_once_with_a_salt_of_its_content() -> None:
    world = World()
    world.add("a", "b")
    first, second = admitted(world.ask("a", cache_salt="s")), admitted(world.ask("b", cache_salt="s"))
    assert first.adapter_number != second.adapter_number
    assert len({first.cache_salt, second.cache_salt, "s", "of as", "of a"}) == 5
    refused(world.ask("c"), RefusalCode.UNKNOWN_ADAPTER)
    refused(world.ask("a", adapter_fingerprint="of b"), RefusalCode.UNKNOWN_ADAPTER)
    admitted(world.ask("a", adapter_fingerprint="of a"))


def test_the_least_recently_used_idle_one_makes_room() -> None:
    world = World()
    world.add("a", "b", "c")
    assert world.held_contents() == {"of a", "of b"}
    for name in ("a", "b", "a"):
        world.desk.ended(admitted(world.ask(name)).request_id)
    assert world.ask("c") is None
    assert world.held_contents() == {"of a"}
    world.finish_reads()
    assert world.wakes
    (decided,) = world.decide()
    assert decided.refusal is None
    assert world.held_contents() == {"of a", "of c"}
    assert (world.shelf.loads, world.shelf.evictions) == (3, 1)


def test_one_in_use_stays_and_the_wait_for_it_is_bounded() -> None:
    world = World(places=1)
    world.add("a", "b")
    running = admitted(world.ask("a"))
    assert world.ask("b") is None
    assert world.ask("b", 1.0, timeout_s=5.0) is None
    assert not world.reads
    assert world.desk.next_deadline() == 6.0
    assert not world.decide(5.9)
    (late,) = world.decide(6.0)
    refused(late.refusal, RefusalCode.DEADLINE)
    (full,) = world.decide(MAX_WAIT_S)
    refused(full.refusal, RefusalCode.QUEUE_FULL)
    assert world.held_contents() == {"of a"}
    for request_id in (late.command.request_id, full.command.request_id, running.request_id):
        world.desk.ended(request_id)
    assert world.ask("b") is None
    world.finish_reads()
    assert [decided.refusal for decided in world.decide()] == [None]


def test_so_many_wait_and_no_more() -> None:
    world = World(places=1)
    world.add("a", "b")
    admitted(world.ask("a"))
    for _ in range(MAX_WAITING):
        assert world.ask("b") is None
    refused(world.ask("b"), RefusalCode.QUEUE_FULL)
    admitted(world.ask("a"))


def test_waiting_together_they_are_read_for_once() -> None:
    world = World(places=1)
    world.add("a", "b")
    assert [world.ask("b") for _ in range(3)] == [None] * 3
    assert [folder for folder, _ in world.reads] == ["b"]
    world.finish_reads()
    assert len(world.decide()) == 3
    assert world.held_contents() == {"of b"}


@pytest.mark.parametrize("change", ["gone", "other"])
def test_files_that_changed_are_not_served_under_the_old_name(change: str) -> None:
    world = World(places=1)
    world.add("a", "b")
    assert world.ask("b", samples=2) is None
    if change == "gone":
        del world.files["b"]
    else:
        world.files["b"] = Content("something else")
    world.finish_reads()
    (decided,) = world.decide()
    refused(decided.refusal, RefusalCode.UNKNOWN_ADAPTER)
    assert not world.held
    assert world.ask("a") is None  # the place is free again
    world.finish_reads()
    assert [each.refusal for each in world.decide()] == [None]


def test_an_abort_ends_the_wait_of_its_sample_alone() -> None:
    world = World(places=1)
    world.add("a", "b")
    cause = Refusal(RefusalCode.CANCELLED, "left")
    assert world.ask("b", samples=2) is None
    world.desk.abort(1, cause)
    assert not world.decide()
    world.desk.abort(2, cause)
    (decided,) = world.decide()
    assert (decided.refusal, set(decided.aborted)) == (cause, {1, 2})


def test_load_again_and_unload() -> None:
    world = World()
    world.add("a")
    running = admitted(world.ask("a"))
    world.files["new"] = Content("newer")
    world.desk.load(LoadAdapter(7, "a", "new"))
    world.desk.load(LoadAdapter(8, "x", "nothing"))
    world.finish_reads()
    assert not world.decide()
    news = world.desk.take_news()
    assert news is not None
    answers = dict(news.answers)
    assert answers[7] is None
    refused(answers[8], RefusalCode.INVALID)
    assert [(each.name, each.fingerprint) for each in news.adapters] == [("a", "newer")]
    assert world.held_contents() == {"of a", "newer"}
    assert admitted(world.ask("a")).adapter_number != running.adapter_number
    world.desk.ended(running.request_id)
    assert world.held_contents() == {"newer"}
    world.desk.unload(UnloadAdapter(9, "a"))
    assert world.held_contents() == {"newer"}
    refused(world.ask("a"), RefusalCode.UNKNOWN_ADAPTER)
    world.desk.ended(2)
    assert not world.held
    assert world.desk.take_news() is not None
    assert world.desk.take_news() is None


def test_one_that_left_while_its_files_were_read_takes_no_place() -> None:
    world = World(places=1)
    world.add("a", "b")
    assert world.ask("b") is None
    world.desk.unload(UnloadAdapter(1, "b"))
    world.desk.abort(1, Refusal(RefusalCode.CANCELLED, "left"))
    assert [decided.refusal is not None for decided in world.decide()] == [True]
    world.desk.ended(1)
    world.finish_reads()
    world.decide()
    assert world.held_contents() == set()
    assert world.ask("a") is None
    world.finish_reads()
    assert [admitted(decided.command).adapter for decided in world.decide()] == ["a"]
    assert world.held_contents() == {"of a"}


def test_one_that_finds_no_memory_is_refused_alone() -> None:
    world = World()
    world.add("a", "b", "c")
    world.too_large.add("of c")
    assert world.ask("c") is None
    running = admitted(world.ask("b"))
    world.finish_reads()
    (decided,) = world.decide()
    refused(decided.refusal, RefusalCode.QUEUE_FULL)
    world.desk.ended(decided.command.request_id)
    assert {state.name: state.is_resident for state in world.shelf.states()} == {"a": False, "b": True, "c": False}
    world.too_large.clear()
    assert world.ask("c") is None
    world.finish_reads()
    (decided,) = world.decide()
    assert decided.refusal is None
    world.desk.ended(running.request_id)

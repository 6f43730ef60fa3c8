"""Observations that wait until the metrics are read: none lost, none twice, whoever reads."""

import threading

from prometheus_client import CollectorRegistry, Counter

from service_runtime.metrics import MAX_WAITING, Deferred


def _counting(registry: CollectorRegistry) -> tuple[Deferred[int], list[int]]:
    """A Deferred that feeds the counter `seen`, and the sizes of the batches it was given."""
    batches: list[int] = []

    def observe(items: list[int]) -> None:
        batches.append(len(items))
        counter.inc(sum(items))

    deferred = Deferred(registry, observe)
    counter = Counter("seen", "Sum of what was added", registry=registry)
    return deferred, batches


def test_a_reader_sees_everything_added_before() -> None:
    registry = CollectorRegistry()
    deferred, batches = _counting(registry)
    for value in (1, 2, 3):
        deferred.add(value)
    assert batches == []
    assert registry.get_sample_value("seen_total") == 6
    assert registry.get_sample_value("seen_total") == 6
    assert batches == [3]


def test_without_readers_only_so_many_wait() -> None:
    deferred, batches = _counting(CollectorRegistry())
    for _ in range(2 * MAX_WAITING + 1):
        deferred.add(1)
    assert batches == [MAX_WAITING, MAX_WAITING]


def test_readers_beside_the_writer_lose_and_double_nothing() -> None:
    registry = CollectorRegistry()
    deferred, _ = _counting(registry)
    is_over = threading.Event()

    def read() -> None:
        while not is_over.is_set():
            registry.get_sample_value("seen_total")

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for _ in range(20_000):
        deferred.add(1)
    is_over.set()
    for reader in readers:
        reader.join()
    assert registry.get_sample_value("seen_total") == 20_000

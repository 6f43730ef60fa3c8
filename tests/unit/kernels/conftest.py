"""The compiled kernels for tests: each variant that this CPU can execute, built once into the cache folder."""

import sys
from collections.abc import Iterator

import pytest

from engine_service.worker.kernels.build import (
    Unavailable,
    Variant,
    default_folder,
    find_compiler,
    prepare_library,
    read_cpu_flags,
    runnable_variants,
)
from engine_service.worker.kernels.library import KernelLibrary, ThreadTeam

_VARIANTS = runnable_variants(read_cpu_flags())


def _load(variant: Variant) -> KernelLibrary:
    made = prepare_library(variant, default_folder(), find_compiler(), lambda line: print(line, file=sys.stderr))
    assert not isinstance(made, Unavailable), made.reason
    return KernelLibrary(made)


@pytest.fixture(scope="session", params=_VARIANTS, ids=lambda variant: variant.value)
def library(request: pytest.FixtureRequest) -> KernelLibrary:
    """Each variant in turn."""
    return _load(request.param)


@pytest.fixture(scope="session")
def best_library() -> KernelLibrary:
    """The variant that would serve here."""
    return _load(_VARIANTS[0])


@pytest.fixture(scope="session")
def team(library: KernelLibrary) -> Iterator[ThreadTeam]:
    """Two threads of each variant."""
    with ThreadTeam(library, 2) as team:
        yield team


@pytest.fixture(scope="session")
def best_team(best_library: KernelLibrary) -> Iterator[ThreadTeam]:
    with ThreadTeam(best_library, 2) as team:
        yield team

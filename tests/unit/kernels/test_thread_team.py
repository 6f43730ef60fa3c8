"""The thread team: every item once, whatever the spin; clean starts and ends."""

import subprocess
import sys
import textwrap

import pytest
import torch

from engine_service.worker.kernels.library import KernelLibrary, ThreadTeam


def _count(team: ThreadTeam, items: int, grain: int) -> torch.Tensor:
    counters = torch.zeros(items, dtype=torch.int32)
    team.library.call("pool_count", team.handle, items, grain, counters.data_ptr())
    return counters


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("spin", [0, 50, 2000])
def test_every_item_is_done_once(best_library: KernelLibrary, threads: int, spin: int) -> None:
    with ThreadTeam(best_library, threads, spin) as team:
        for items in [0, 1, 2, 3, 7, 64, 1000]:
            for grain in [1, 5, 10_000]:
                assert (_count(team, items, grain) == 1).all(), (items, grain)


@pytest.mark.parametrize("spin", [0, 20])
def test_many_short_phases(best_library: KernelLibrary, spin: int) -> None:
    with ThreadTeam(best_library, 3, spin) as team:
        counters = torch.zeros(11, dtype=torch.int32)
        for _ in range(5000):
            team.library.call("pool_count", team.handle, 11, 1, counters.data_ptr())
    assert (counters == 5000).all()


def test_a_hundred_teams_start_and_end(best_library: KernelLibrary) -> None:
    for i in range(100):
        team = ThreadTeam(best_library, 1 + i % 4, spin=i % 3)
        if i % 2:
            assert (_count(team, 20, 1) == 1).all()
        team.close()
        team.close()


def test_an_interpreter_that_forgets_its_team_ends_cleanly(best_library: KernelLibrary) -> None:
    script = """
        import sys
        from pathlib import Path
        from engine_service.worker.kernels.library import KernelLibrary, ThreadTeam
        team = ThreadTeam(KernelLibrary(Path(sys.argv[1])), 4)
        print(team.threads)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), best_library._library._name]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "4\n", "")


def test_no_team_of_zero_threads(best_library: KernelLibrary) -> None:
    with pytest.raises(ValueError, match="at least 1 thread, not 0"):
        ThreadTeam(best_library, 0)

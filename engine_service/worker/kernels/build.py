"""Compiles the C++ kernels for this CPU once, and keeps the library in the cache folder.

`python -m engine_service.worker.kernels.build` builds ahead (at install or into an image).
Must not know: what the kernels do, models.
"""

import argparse
import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from service_runtime.config import cache_folder, shipped_folder

SOURCE_FOLDER = Path(__file__).parent
_COMPILERS = ("g++", "c++", "clang++")
# Contraction off: a product and a sum round the same way wherever the compiler inlines them.
_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fPIC", "-fvisibility=hidden", "-pthread")


class Variant(Enum):
    """An instruction set the kernels can be compiled for, with the compiler's flags."""

    AMX = "amx"
    AVX512_BF16 = "avx512bf16"
    AVX512 = "avx512"
    AVX2 = "avx2"
    GENERIC = "generic"

    @property
    def flags(self) -> tuple[str, ...]:
        return _VARIANT_FLAGS[self]


_VARIANT_FLAGS = {
    Variant.AMX: ("-march=x86-64-v4", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
    Variant.AVX512_BF16: ("-march=x86-64-v4", "-mavx512bf16"),
    Variant.AVX512: ("-march=x86-64-v4",),
    Variant.AVX2: ("-march=x86-64-v3",),
    Variant.GENERIC: (),
}
_AVX2_NEEDS = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe"})
_AVX512_NEEDS = _AVX2_NEEDS | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_VARIANT_NEEDS = {
    Variant.AMX: _AVX512_NEEDS | {"avx512_bf16", "amx_tile", "amx_bf16"},
    Variant.AVX512_BF16: _AVX512_NEEDS | {"avx512_bf16"},
    Variant.AVX512: _AVX512_NEEDS,
    Variant.AVX2: _AVX2_NEEDS,
    Variant.GENERIC: frozenset[str](),
}
# Linux on x86-64: arch_prctl and its requests about the state of extended features.
_ARCH_PRCTL, _GET_PERMISSION, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1022, 0x1023, 18


@dataclass(frozen=True, slots=True)
class Unavailable:
    """There are no kernels here; `reason` is a sentence for the log."""

    reason: str


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C++ compiler; `version` is the first line it says of itself."""

    path: Path
    version: str


Report = Callable[[str], None]


def read_cpu_flags(file: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """The instruction sets that Linux lists for the first CPU; empty where it lists none."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())


def request_tiles() -> bool:
    """Asks the operating system to let this process use AMX tiles; sandboxes refuse, whatever the CPU's flags say."""
    if platform.machine() != "x86_64":
        return False
    libc = ctypes.CDLL(None)
    if libc.syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) != 0:
        return False
    permitted = ctypes.c_uint64(0)
    answer = libc.syscall(_ARCH_PRCTL, _GET_PERMISSION, ctypes.byref(permitted))
    return answer == 0 and bool(permitted.value >> _TILE_DATA & 1)


def runnable_variants(cpu_flags: frozenset[str], tiles: Callable[[], bool] = request_tiles) -> tuple[Variant, ...]:
    """The variants this CPU can execute, the best one first; `tiles` is asked only where it has them."""
    fitting = tuple(variant for variant in Variant if _VARIANT_NEEDS[variant] <= cpu_flags)
    return fitting if Variant.AMX not in fitting or tiles() else fitting[1:]


def find_compiler(names: Iterable[str] = _COMPILERS) -> Compiler | None:
    """The first C++ compiler on the search path."""
    for name in names:
        path = shutil.which(name)
        if path is None:
            continue
        answer = _run([path, "--version"])
        if answer.returncode == 0 and answer.stdout:
            return Compiler(Path(path), answer.stdout.splitlines()[0])
    return None


def default_folder() -> Path:
    """Where compiled kernels are kept."""
    return cache_folder() / "kernels"


def prepare_library(
    variant: Variant,
    folder: Path,
    compiler: Compiler | None,
    report: Report,
    source_folder: Path = SOURCE_FOLDER,
) -> Path | Unavailable:
    """The library of `variant`, compiled unless `folder` holds it already.

    Without a compiler a library of the same sources made elsewhere will do. `report` gets a line before
    the compiler runs, which takes some ten seconds.
    """
    if platform.system() != "Linux":
        return Unavailable(f"the C++ kernels need Linux, this is {platform.system()}")
    prefix = _prefix(variant, source_folder)
    if compiler is None:
        made = sorted(folder.glob(f"{prefix}-*.so"))
        return made[0] if made else Unavailable("the C++ kernels are not built and there is no C++ compiler")
    library = folder / f"{prefix}-{_digest(compiler.version, *_FLAGS, *variant.flags)}.so"
    if library.is_file():
        return library
    report(f"compiling the C++ kernels for {variant.value} with {compiler.path.name}, once")
    return _compile(variant, library, compiler, source_folder)


def prepare_best_library(folder: Path, report: Report) -> Path | Unavailable:
    """`prepare_library` of the best variant for this CPU, with the compiler found here.

    If any that runs here was shipped, the best of those, and nothing is compiled.
    """
    variants = runnable_variants(read_cpu_flags())
    shipped = shipped_folder()
    if shipped is not None:
        for variant in variants:
            made = sorted((shipped / "kernels").glob(f"{_prefix(variant, SOURCE_FOLDER)}-*.so"))
            if made:
                return made[0]
    return prepare_library(variants[0], folder, find_compiler(), report)


def _prefix(variant: Variant, source_folder: Path) -> str:
    """How the names of all libraries begin that were made of these sources."""
    sources = _digest(*(part for file in _sources(source_folder) for part in (file.name, file.read_text())))
    return f"{variant.value}-{platform.machine()}-{sources}"


def _sources(folder: Path) -> list[Path]:
    return sorted([*folder.glob("*.cpp"), *folder.glob("*.hpp")])


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _compile(variant: Variant, library: Path, compiler: Compiler, source_folder: Path) -> Path | Unavailable:
    """Compiles beside the target and renames, so that two builders at once do no harm."""
    library.parent.mkdir(parents=True, exist_ok=True)
    units = sorted(source_folder.glob("*.cpp"))
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        objects = [Path(scratch) / f"{unit.stem}.o" for unit in units]
        base = [str(compiler.path), *_FLAGS, *variant.flags]
        commands = [[*base, "-c", str(unit), "-o", str(obj)] for unit, obj in zip(units, objects, strict=True)]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as jobs:
            answers = list(jobs.map(_run, commands))
        linked = Path(scratch) / library.name
        if all(answer.returncode == 0 for answer in answers):
            answers.append(_run([*base, "-shared", "-o", str(linked), *map(str, objects)]))
        failed = next((answer for answer in answers if answer.returncode != 0), None)
        if failed is not None:
            return Unavailable(f"the C++ kernels do not compile with {compiler.version}: {_error_of(failed)}")
        linked.replace(library)
    return library


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - our own arguments


def _error_of(answer: subprocess.CompletedProcess[str]) -> str:
    lines = answer.stderr.strip().splitlines()
    return next((line for line in lines if "error" in line), lines[0] if lines else "no message")


def main(arguments: list[str] | None = None) -> int:
    """Builds the kernels for this CPU (or `--variant`); prints the library's path."""
    parser = argparse.ArgumentParser(prog="python -m engine_service.worker.kernels.build", description=main.__doc__)
    parser.add_argument("--folder", type=Path, default=default_folder(), help="where the library is kept")
    parser.add_argument("--variant", choices=[variant.value for variant in Variant], help="default: the best here")
    options = parser.parse_args(arguments)
    best = runnable_variants(read_cpu_flags())[0]
    variant = Variant(options.variant) if options.variant else best
    made = prepare_library(variant, options.folder, find_compiler(), lambda line: print(line, file=sys.stderr))
    if isinstance(made, Unavailable):
        print(made.reason, file=sys.stderr)
        return 1
    print(made)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

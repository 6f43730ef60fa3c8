"""Building: the right variant, once, and a plain value when it cannot be."""

from pathlib import Path

import pytest

from engine_service.worker.kernels import build
from engine_service.worker.kernels.build import (
    SOURCE_FOLDER,
    Compiler,
    Unavailable,
    Variant,
    find_compiler,
    prepare_best_library,
    prepare_library,
    read_cpu_flags,
    request_tiles,
    runnable_variants,
)

_AVX2 = {"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe"}
_AMX = {"amx_tile", "amx_bf16"}
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A library that compiles in a moment."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "one.cpp").write_text('extern "C" int one() { return 1; }\n')
    return folder


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (set(), [Variant.GENERIC]),
        (_AVX2, [Variant.AVX2, Variant.GENERIC]),
        (_AVX2 - {"fma"}, [Variant.GENERIC]),
        (_AVX512, [Variant.AVX512, Variant.AVX2, Variant.GENERIC]),
        (_AVX512 | {"avx512_bf16"}, [Variant.AVX512_BF16, Variant.AVX512, Variant.AVX2, Variant.GENERIC]),
        (_AVX512 | {"avx512_bf16"} | _AMX, list(Variant)),
        (_AVX512 | {"avx512_bf16", "amx_tile"}, [Variant.AVX512_BF16, Variant.AVX512, Variant.AVX2, Variant.GENERIC]),
        (_AVX512 | _AMX, [Variant.AVX512, Variant.AVX2, Variant.GENERIC]),
        (_AVX2 | {"avx512_bf16"}, [Variant.AVX2, Variant.GENERIC]),
    ],
)
def test_variants_that_a_cpu_can_execute(flags: set[str], expected: list[Variant]) -> None:
    assert list(runnable_variants(frozenset(flags), tiles=lambda: True)) == expected


def test_tiles_that_the_operating_system_refuses_are_not_used() -> None:
    """The CPU's flags do not say what a sandbox permits."""
    flags = frozenset(_AVX512 | {"avx512_bf16"} | _AMX)
    assert list(runnable_variants(flags, tiles=lambda: False)) == [v for v in Variant if v is not Variant.AMX]


def test_tiles_are_asked_for_only_where_the_cpu_has_them() -> None:
    def refuse() -> bool:
        raise AssertionError("asked")

    assert runnable_variants(frozenset(_AVX512), tiles=refuse)[0] is Variant.AVX512


def test_permission_for_tiles_follows_the_cpu() -> None:
    """Real calls: no permission without the hardware, and asking twice changes nothing."""
    answers = {request_tiles(), request_tiles()}
    assert len(answers) == 1
    assert read_cpu_flags() >= _AMX or answers == {False}


def test_cpu_flags_are_read_from_the_first_cpu(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nflags\t\t: fpu avx2 fma\n\nprocessor\t: 1\nflags\t\t: fpu\n")
    assert read_cpu_flags(file) == {"fpu", "avx2", "fma"}
    assert read_cpu_flags(tmp_path / "missing") == frozenset()


def test_built_once_and_rebuilt_when_a_source_changes(tmp_path: Path, sources: Path) -> None:
    lines: list[str] = []
    compiler = find_compiler()
    assert compiler is not None
    made = [
        prepare_library(Variant.GENERIC, tmp_path, compiler, lines.append, sources),
        prepare_library(Variant.GENERIC, tmp_path, compiler, lines.append, sources),
    ]
    assert made[0] == made[1]
    assert len(lines) == 1
    assert "generic" in lines[0]
    (sources / "one.cpp").write_text('extern "C" int one() { return 2; }\n')
    changed = prepare_library(Variant.GENERIC, tmp_path, compiler, lines.append, sources)
    assert changed != made[0]
    assert isinstance(changed, Path)
    assert changed.is_file()
    assert len(lines) == 2


def test_another_compiler_or_variant_is_another_library(tmp_path: Path, sources: Path) -> None:
    compiler = find_compiler()
    assert compiler is not None
    other = Compiler(compiler.path, "another version")
    made = {
        prepare_library(Variant.GENERIC, tmp_path, compiler, lambda _: None, sources),
        prepare_library(Variant.GENERIC, tmp_path, other, lambda _: None, sources),
        prepare_library(Variant.AVX2, tmp_path, compiler, lambda _: None, sources),
    }
    assert len(made) == 3


def test_without_compiler_a_library_made_before_is_used(tmp_path: Path, sources: Path) -> None:
    lines: list[str] = []
    missing = prepare_library(Variant.GENERIC, tmp_path, None, lines.append, sources)
    assert isinstance(missing, Unavailable)
    assert "no C++ compiler" in missing.reason
    made = prepare_library(Variant.GENERIC, tmp_path, find_compiler(), lines.append, sources)
    assert prepare_library(Variant.GENERIC, tmp_path, None, lines.append, sources) == made


def test_a_library_that_was_shipped_is_used_before_any_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the images: the best that runs on this CPU, of these very sources, whatever compiler made it."""
    kernels = tmp_path / "shipped" / "kernels"
    kernels.mkdir(parents=True)
    monkeypatch.setenv("TOKENWIRE_SHIPPED", str(kernels.parent))
    for variant in reversed(runnable_variants(read_cpu_flags())):
        library = kernels / f"{build._prefix(variant, SOURCE_FOLDER)}-0123456789abcdef.so"
        library.touch()
        assert prepare_best_library(tmp_path / "cache", pytest.fail) == library
    assert not (tmp_path / "cache").exists()


def test_sources_that_do_not_compile_are_a_reason(tmp_path: Path, sources: Path) -> None:
    (sources / "two.cpp").write_text("int two() { return undeclared; }\n")
    made = prepare_library(Variant.GENERIC, tmp_path, find_compiler(), lambda _: None, sources)
    assert isinstance(made, Unavailable)
    assert "undeclared" in made.reason
    assert not list(tmp_path.glob("*.so"))


def test_no_compiler_of_that_name() -> None:
    assert find_compiler(["no-such-compiler"]) is None


def test_sources_are_packaged_beside_the_builder() -> None:
    assert (SOURCE_FOLDER / "c_decoder.cpp").is_file()
    assert all(file.stat().st_size > 0 for file in SOURCE_FOLDER.glob("*.[ch]pp"))

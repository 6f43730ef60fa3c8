"""The compiled kernels as typed functions: signatures of c_decoder.cpp and c_ops.cpp, and the thread team.

Must not know: tensors' meaning, models, where the library comes from.
"""

import ctypes
import weakref
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

_ERROR_BYTES = 256
# Pauses before a waiting thread sleeps: some tens of microseconds, longer than the gaps inside a step.
DEFAULT_SPIN = 2000


class NumberType(IntEnum):
    """Number type of weights and KV as the C interface counts them."""

    FLOAT32 = 0
    BFLOAT16 = 1

    @staticmethod
    def of(dtype: torch.dtype) -> "NumberType":
        """ValueError for a dtype the kernels do not have."""
        if dtype is torch.float32:
            return NumberType.FLOAT32
        if dtype is torch.bfloat16:
            return NumberType.BFLOAT16
        raise ValueError(f"the CPU kernels compute in float32 or bfloat16, not {dtype}")


class DecoderConfigStruct(ctypes.Structure):
    """DecoderConfig of decoder.hpp."""

    _fields_ = (
        ("layers", ctypes.c_int32),
        ("hidden", ctypes.c_int32),
        ("query_heads", ctypes.c_int32),
        ("kv_heads", ctypes.c_int32),
        ("head_size", ctypes.c_int32),
        ("intermediate", ctypes.c_int32),
        ("vocabulary", ctypes.c_int32),
        ("positions", ctypes.c_int32),
        ("num_blocks", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
        ("epsilon", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("format", ctypes.c_int32),
    )


class CodesStruct(ctypes.Structure):
    """Codes of linear.hpp."""

    _fields_ = (
        ("codes", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("zeros", ctypes.c_void_p),
        ("outputs", ctypes.c_int),
        ("inputs", ctypes.c_int),
        ("group", ctypes.c_int),
    )


class BatchStruct(ctypes.Structure):
    """Batch of batch.hpp."""

    _fields_ = (
        ("tokens", ctypes.c_int),
        ("chunks", ctypes.c_int),
        ("table_width", ctypes.c_int),
        ("slot_mapping", ctypes.c_void_p),
        ("block_tables", ctypes.c_void_p),
        ("query_start", ctypes.c_void_p),
        ("seq_lens", ctypes.c_void_p),
    )


class DecoderStepStruct(ctypes.Structure):
    """DecoderStep of decoder.hpp."""

    _fields_ = (
        ("batch", BatchStruct),
        ("input_ids", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("sampled", ctypes.c_int),
        ("sample_rows", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
        ("best", ctypes.c_void_p),
        ("adapters", ctypes.c_void_p),
    )


class AttentionShapeStruct(ctypes.Structure):
    """AttentionShape of attention.hpp."""

    _fields_ = (
        ("query_heads", ctypes.c_int),
        ("kv_heads", ctypes.c_int),
        ("head_size", ctypes.c_int),
        ("scale", ctypes.c_float),
        ("window", ctypes.c_int),
    )


class DrawRowsStruct(ctypes.Structure):
    """DrawRows of draw.hpp."""

    _fields_ = (
        ("rows", ctypes.c_int),
        ("mask_words", ctypes.c_int),
        ("logits", ctypes.c_void_p),
        ("places", ctypes.c_void_p),
        ("mask_rows", ctypes.c_void_p),
        ("masks", ctypes.c_void_p),
        ("temperatures", ctypes.c_void_p),
        ("top_ks", ctypes.c_void_p),
        ("top_ps", ctypes.c_void_p),
        ("min_ps", ctypes.c_void_p),
        ("uniforms", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
    )


_P, _I, _L = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
# Name -> (result, arguments); the trailing char* of most is where a reason for failure is written.
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "variant": (ctypes.c_char_p, ()),
    "pool_create": (_P, (_I, _I, _P)),
    "pool_destroy": (None, (_P,)),
    "pool_count": (None, (_P, _I, _I, _P)),
    "decoder_create": (_P, (_P, _I, _P, _P)),
    "decoder_destroy": (None, (_P,)),
    "decoder_set": (_I, (_P, _I, _I, _P, _L, _L, _P)),
    "decoder_set_adapter": (_I, (_P, _I, _I, _I, _P, _L, _L, _P, _L, _P)),
    "decoder_drop_adapter": (None, (_P, _I)),
    "decoder_adapter_bytes": (_L, (_P,)),
    "decoder_set_codes": (_I, (_P, _I, _I, _P, _P)),
    "decoder_window": (None, (_P, _I, _I)),
    "decoder_step": (_I, (_P, _P, _P)),
    "decoder_copy_blocks": (None, (_P, _I, _P)),
    "decoder_weight_bytes": (_L, (_P,)),
    "decoder_kv_bytes": (_L, (_P,)),
    "decoder_times": (None, (_P, _I, _P)),
    "matrix_create": (_P, (_I, _I, _P, _I, _I, _P, _P)),
    "matrix_of_codes": (_P, (_I, _P, _P, _P)),
    "matrix_destroy": (None, (_P,)),
    "matrix_multiply": (_I, (_P, _P, _I, _I, _P, _P, _P)),
    "paged_create": (_P, (_I, _P, _I, _I, _I, _P, _P)),
    "paged_destroy": (None, (_P,)),
    "paged_write": (_I, (_P, _I, _P, _P, _P, _P, _P)),
    "paged_copy_blocks": (None, (_P, _I, _P)),
    "paged_attend": (_I, (_P, _I, _P, _I, _P, _P, _P, _P)),
    "draw_create": (_P, (_I, _P, _P)),
    "draw_destroy": (None, (_P,)),
    "draw": (_I, (_P, _P, _P)),
    "map": (None, (_I, _P, _I, _P)),
}


def int_pairs(pairs: Sequence[tuple[int, int]]) -> ctypes.Array[ctypes.c_int32]:
    """[2 * pairs] as C reads them."""
    return (ctypes.c_int32 * (2 * len(pairs)))(*(number for pair in pairs for number in pair))


class KernelLibrary:
    """One compiled library. Calls release the GIL; a failure becomes MemoryError or ValueError."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._functions = {name: self._bind(name) for name in _SIGNATURES}
        self.variant: str = self._functions["variant"]().decode()

    def _bind(self, name: str) -> Any:
        function = getattr(self._library, f"tokenwire_{name}")
        function.restype, function.argtypes = _SIGNATURES[name]
        return function

    def call(self, name: str, *arguments: Any) -> Any:
        """A function that cannot fail."""
        return self._functions[name](*arguments)

    def checked(self, name: str, *arguments: Any) -> None:
        """A function that returns 0, or else writes a reason."""
        error = ctypes.create_string_buffer(_ERROR_BYTES)
        if self._functions[name](*arguments, error) != 0:
            raise _failure(error)

    def create(self, name: str, *arguments: Any) -> int:
        """A constructor: the handle."""
        error = ctypes.create_string_buffer(_ERROR_BYTES)
        handle: int | None = self._functions[name](*arguments, error)
        if handle is None:
            raise _failure(error)
        return handle


def _failure(error: ctypes.Array[ctypes.c_char]) -> Exception:
    reason = error.value.decode()
    return MemoryError(reason) if reason == "out of memory" else ValueError(reason)


class ThreadTeam:
    """The threads that execute kernels; `threads` counts the calling one.

    Owned by whoever made it; kernels that were given it must be dropped before `close`. A forgotten team is
    ended with the interpreter.
    """

    def __init__(self, library: KernelLibrary, threads: int, spin: int = DEFAULT_SPIN) -> None:
        if threads < 1:
            raise ValueError(f"a thread team needs at least 1 thread, not {threads}")
        self.library = library
        self.threads = threads
        self.handle = library.create("pool_create", threads, spin)
        self._end = weakref.finalize(self, library.call, "pool_destroy", self.handle)

    def close(self) -> None:
        """Ends the threads; a second call does nothing."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

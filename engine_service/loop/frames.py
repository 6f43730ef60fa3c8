"""Objects as length-prefixed frames on a byte stream between our own two processes.

Must not know: what the objects mean. Only for pipes whose other end is our own process: it unpickles.
"""

import pickle
import struct

_HEADER = struct.Struct(">I")


def encode_frame(message: object) -> bytes:
    """4 bytes of length, then the pickled message."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _HEADER.pack(len(body)) + body


class FrameDecoder:
    """Cuts a byte stream back into messages, wherever it was split."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[object]:
        """Adds bytes and returns the messages that are now complete."""
        self._buffer += data
        messages: list[object] = []
        start = 0
        while len(self._buffer) - start >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._buffer, start)
            end = start + _HEADER.size + length
            if len(self._buffer) < end:
                break
            with memoryview(self._buffer) as view:
                messages.append(pickle.loads(view[start + _HEADER.size : end]))  # noqa: S301 (our own process)
            start = end
        del self._buffer[:start]
        return messages

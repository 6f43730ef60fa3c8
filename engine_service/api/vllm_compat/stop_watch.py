"""Finds stop strings in the text of a sample, so that the engine stops where the gateway will cut.

The only place of the engine service that turns tokens into text; none of it leaves. The gateway shows the text and
trims it with its own detokenizer; here it is only about not computing what nobody will see.
Must not know: gRPC, requests, what is running.
"""

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

# Tokens without text after which the library's window is begun anew: its cost grows with the square of them.
_MAX_SILENT_TOKENS = 32


class StopWatch:
    """Watches one sample. `found` is the stop string that ended it, None so far.

    What lies in the first `min_tokens` tokens ends nothing. Text that the tokenizer cannot tell from token to token
    (broken characters) is passed over: then the gateway alone finds the string, later.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], min_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._kept = max(map(len, stops)) - 1
        self._num_ignored = min_tokens
        self._stream = DecodeStream(skip_special_tokens=True)
        self._num_silent = 0
        self._tail = ""
        self.found: str | None = None

    def add(self, token_id: int) -> bool:
        """Whether this token completes a stop string."""
        text = self._tail + self._decode(token_id)
        if self._num_ignored > 0:
            self._num_ignored -= 1
            return False
        places = [(place, stop) for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self.found = min(places)[1]
            return True
        self._tail = text[-self._kept :] if self._kept else ""
        return False

    def _decode(self, token_id: int) -> str:
        """The text that this token makes certain."""
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except Exception:  # the library has no class of its own for a window that does not fit together
            text, self._num_silent = None, _MAX_SILENT_TOKENS
        if text:
            self._num_silent = 0
            return text
        self._num_silent += 1
        if self._num_silent > _MAX_SILENT_TOKENS:
            self._stream, self._num_silent = DecodeStream(skip_special_tokens=True), 0
        return ""

"""The one exception of this folder, and the checks of text that need no tokenizer.

Must not know: gRPC, protobuf, configuration (limits are arguments).
"""


class TextError(Exception):
    """One request's text cannot be served; other requests are not concerned.

    `field` names the client's field that is wrong ("text", "messages[2].content", "stop"). None means that
    the client made no mistake: the tokenizer failed on this one request. `message` is fit for the client:
    numbers yes; class names, paths and tracebacks no.
    """

    def __init__(self, field: str | None, message: str) -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.field = field
        self.message = message


def check_size(field: str, text: str, *, max_chars: int | None = None, max_bytes: int | None = None) -> None:
    """Raises TextError for a `text` of more characters, or UTF-8 bytes, than allowed (None: any)."""
    if max_chars is not None and len(text) > max_chars:
        raise TextError(field, f"{len(text):,} characters exceed the limit of {max_chars:,}")
    # A character has at most 4 bytes: most texts are known to fit without being encoded.
    if max_bytes is not None and len(text) * 4 > max_bytes:
        size = len(text.encode("utf-8", "surrogatepass"))
        if size > max_bytes:
            raise TextError(field, f"{size:,} bytes exceed the limit of {max_bytes:,}")


def check_unicode(field: str, text: str) -> None:
    """Raises TextError when `text` holds a lone surrogate, which no UTF-8 text can. NUL is an ordinary
    character.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        message = f"character {error.start:,} is the lone surrogate U+{code:04X}, which is not valid Unicode text"
        raise TextError(field, message) from None

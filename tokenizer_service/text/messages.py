"""The turns of a conversation.

Must not know: templates, tokens, protobuf.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. `role` is what the model's template knows: "system", "user", "assistant", ..."""

    role: str
    content: str

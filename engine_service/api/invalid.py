"""How the checks of one message are left at its first violation.

Must not know: messages, statuses.
"""


class Invalid(Exception):
    """A field is out of range; `field` is its path in the message. `parse_token_request` makes a refusal of it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field

"""The one place where a refusal becomes an HTTP status and an error object in OpenAI's shape.

Must not know: why requests are refused, what the endpoints do.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tokenizer_service.engines.refusal import Refusal, RefusalCode, Violation, invalid

_STATUSES = {
    RefusalCode.INVALID_ARGUMENT: 400,
    RefusalCode.OUT_OF_RANGE: 400,
    RefusalCode.FAILED_PRECONDITION: 400,
    RefusalCode.UNAUTHENTICATED: 401,
    RefusalCode.PERMISSION_DENIED: 403,
    RefusalCode.NOT_FOUND: 404,
    RefusalCode.ALREADY_EXISTS: 409,
    RefusalCode.RESOURCE_EXHAUSTED: 429,
    RefusalCode.UNIMPLEMENTED: 501,
    RefusalCode.UNAVAILABLE: 503,
    RefusalCode.CANCELLED: 503,
    RefusalCode.ABORTED: 503,
    RefusalCode.DEADLINE_EXCEEDED: 504,
}
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    408: "timeout_error",
    429: "rate_limit_error",
    504: "timeout_error",
}
_CODES = {
    RefusalCode.NOT_FOUND: "model_not_found",
    RefusalCode.ALREADY_EXISTS: "request_id_in_use",
    RefusalCode.RESOURCE_EXHAUSTED: "rate_limit_exceeded",
    RefusalCode.UNAVAILABLE: "service_unavailable",
    RefusalCode.CANCELLED: "cancelled",
    RefusalCode.DEADLINE_EXCEEDED: "deadline_exceeded",
}
_FUNCTION = re.compile(r"(tools\[\d+\]|tool_calls\[\d+\]|^tool_choice)\.(name|description|parameters|arguments)")


@dataclass(frozen=True, slots=True)
class HttpError:
    """An error answer. `param` is the client's own name of the wrong field; headers beyond the usual ones.

    `usage`: of what was delivered before, as the API writes it.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    usage: Mapping[str, object] | None = None

    @property
    def type(self) -> str:
        return _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def as_object(self) -> dict[str, object]:
        """What is under the key "error"."""
        made: dict[str, object] = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return made if self.usage is None else made | {"usage": self.usage}

    def body(self) -> bytes:
        return json.dumps({"error": self.as_object()}).encode()


def bad_field(param: str, description: str) -> HttpError:
    return HttpError(400, f"{param}: {description}", param)


@dataclass(frozen=True, slots=True)
class FieldNames:
    """How an API calls the fields of a RequestDraft: the longest prefix in `renamed` is replaced.

    A field in `whole` is named without its parts, which the client wrote in another form. `wraps_functions`: what
    concerns a tool or a call is under a key "function".
    """

    renamed: Mapping[str, str] = field(default_factory=dict)
    whole: Mapping[str, str] = field(default_factory=dict)
    wraps_functions: bool = False

    def of(self, name: str) -> str:
        name = name.removeprefix("options.").removeprefix("sampling.")
        for prefix, whole in self.whole.items():
            if _is_within(name, prefix):
                return whole
        for prefix in sorted(self.renamed, key=len, reverse=True):
            if _is_within(name, prefix):
                return self.renamed[prefix] + name[len(prefix) :]
        return _FUNCTION.sub(r"\1.function.\2", name) if self.wraps_functions else name

    def beside(self, more: Mapping[str, str]) -> "FieldNames":
        """These names, and more that are renamed."""
        return replace(self, renamed={**self.renamed, **more})

    def with_structure(self, name: str) -> "FieldNames":
        """These names, and the client's own for the structured output."""
        return replace(self, whole={**self.whole, "structured_output": name})


def _is_within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith((f"{prefix}.", f"{prefix}["))


def http_error(refusal: Refusal, names: FieldNames) -> HttpError:
    """The error answer to a refused or failed request."""
    violations = tuple(Violation(names.of(item.field), item.description) for item in refusal.violations)
    message = invalid(violations).message if violations else refusal.message
    param = violations[0].field if violations else None
    if refusal.code is RefusalCode.NOT_FOUND:
        param = "model"
    return HttpError(_STATUSES.get(refusal.code, 500), message, param, _CODES.get(refusal.code), _retry_header(refusal))


def _retry_header(refusal: Refusal) -> dict[str, str]:
    if refusal.retry_after_s is None and refusal.code not in (RefusalCode.UNAVAILABLE, RefusalCode.RESOURCE_EXHAUSTED):
        return {}
    return {"retry-after": str(math.ceil(refusal.retry_after_s or 1))}

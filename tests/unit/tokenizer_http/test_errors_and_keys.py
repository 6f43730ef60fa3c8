"""Refusals as HTTP statuses under the client's own names of fields; API keys."""

import hashlib
from pathlib import Path

import pytest

from tokenizer_service.engines.refusal import Refusal, RefusalCode, Violation, invalid, invalid_field
from tokenizer_service.http.errors import FieldNames, http_error
from tokenizer_service.http.keys import ApiKeys, BadKeys
from tokenizer_service.tenants.tenant import ANONYMOUS, TenantTable

RENAMED = {"max_tokens": "max_completion_tokens", "token_ids.ids": "prompt[1]", "text": "prompt"}
NAMES = FieldNames(RENAMED, {"tool_choice.mode": "tool_choice"}, wraps_functions=True).with_structure("guided_json")


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ("options.sampling.temperature", "temperature"),
        ("options.sampling.max_tokens", "max_completion_tokens"),
        ("options.stop[3]", "stop[3]"),
        ("token_ids.ids", "prompt[1]"),
        ("token_ids.ids[7]", "prompt[1][7]"),
        ("text", "prompt"),
        ("texture", "texture"),
        ("tools[0].name", "tools[0].function.name"),
        ("messages[2].tool_calls[1].arguments", "messages[2].tool_calls[1].function.arguments"),
        ("messages[2].name", "messages[2].name"),
        ("tool_choice.name", "tool_choice.function.name"),
        ("tool_choice.mode", "tool_choice"),
        ("options.sampling.structured_output.json_schema", "guided_json"),
    ],
)
def test_fields_have_the_clients_names(field: str, param: str) -> None:
    error = http_error(invalid_field(field, "is 5"), NAMES)
    assert (error.status, error.param, error.message) == (400, param, f"{param}: is 5")


def test_several_flaws_are_counted() -> None:
    error = http_error(invalid((Violation("text", "a"), Violation("options.stop", "b"))), NAMES)
    assert error.message == "prompt: a (and 1 more)"


@pytest.mark.parametrize("code", list(RefusalCode))
def test_every_code_has_a_status(code: RefusalCode) -> None:
    error = http_error(Refusal(code, "why"), NAMES)
    assert 400 <= error.status <= 504
    assert ("retry-after" in error.headers) == (code in (RefusalCode.UNAVAILABLE, RefusalCode.RESOURCE_EXHAUSTED))
    assert (error.type == "server_error") == (error.status in (500, 501, 503))


def test_keys_plain_and_hashed(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# ours\n\n{hashlib.sha256(b'two').hexdigest().upper()}  # second\n")
    keys = ApiKeys.load(["one"], str(file))
    table = TenantTable().with_keys(keys.digests)
    found = [table.by_key(key) for key in ("one", "two", "three", "", "One")]
    assert found == [ANONYMOUS, ANONYMOUS, None, None, None]
    assert not table.is_open
    assert b"one" not in keys.digests
    assert TenantTable().with_keys(ApiKeys().digests).is_open


@pytest.mark.parametrize("content", ["", "# nothing", "secret-in-plain-text", "ab" * 31, "\xff\xfe"])
def test_a_bad_file_of_keys_is_told_without_its_content(tmp_path: Path, content: str) -> None:
    file = tmp_path / "keys"
    file.write_bytes(content.encode("latin-1"))
    with pytest.raises(BadKeys) as caught:
        ApiKeys.load([], str(file))
    assert "secret" not in str(caught.value)


def test_a_missing_file_of_keys(tmp_path: Path) -> None:
    with pytest.raises(BadKeys, match="No such file"):
        ApiKeys.load([], str(tmp_path / "none"))

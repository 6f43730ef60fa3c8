"""Tenants: the file, recognition, priorities, salts and limits, as tables."""

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenizer_service.engines.refusal import Refusal, RefusalCode
from tokenizer_service.tenants.gate import BAD_KEY, MISSING_KEY, Gate
from tokenizer_service.tenants.quota import Quota, Quotas
from tokenizer_service.tenants.tenant import ANONYMOUS, Tenant, TenantLimits, TenantTable
from tokenizer_service.tenants.tenants_file import BadTenants, read_tenants, table_source


def sha(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


GOOD = f"""
[[tenant]]
name = "search"
weight = 4
priority = 2
max_priority = 9
key_sha256 = ["{sha("s1")}", "{sha("s2").upper()}"]
max_requests = 3
max_tokens_in_flight = 1_000
tokens_per_minute = 6_000

[[tenant]]
name = "batch"
certificate_names = ["batch.example", "spiffe://x/batch"]
share_prefix_cache = true
"""


def write(path: Path, text: str) -> Path:
    file = path / "tenants.toml"
    file.write_text(text)
    return file


def test_a_key_that_is_also_nobodys_is_the_tenants() -> None:
    digest = hashlib.sha256(b"secret").digest()
    mine = Tenant(name="mine")
    assert TenantTable(((digest, mine),)).with_keys([digest]).by_key("secret") is mine


def test_a_good_file(tmp_path: Path) -> None:
    table = read_tenants(write(tmp_path, GOOD))
    search = Tenant("search", 4, 2, 2, 9, False, TenantLimits(3, 1000, 6000))
    assert [table.by_key(key) for key in ("s1", "s2", "s3", "")] == [search, search, None, None]
    batch = table.by_certificate(["other", "spiffe://x/batch"])
    assert batch is not None
    assert (batch.name, batch.weight, batch.share_prefix_cache) == ("batch", 1, True)
    assert table.by_certificate(["search"]) is None
    assert not table.is_open


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("weight = 4", "weight = 0", ("tenant.0.weight", "1")),
        ("weight = 4", "weight = 1001", ("tenant.0.weight", "1000")),
        ("weight = 4", 'weight = "4"', ("tenant.0.weight",)),
        ("weight = 4", "wieght = 4", ("wieght",)),
        ("priority = 2", "priority = 10", ("priority 10", "10..9")),
        ('"search"', '"sea rch"', ("tenant.0.name",)),
        ('"search"', '""', ("tenant.0.name",)),
        ('"search"', f'"{"x" * 65}"', ("tenant.0.name",)),
        ('"search"', '"batch"', ("two tenants", "batch")),
        (sha("s1"), "secret-key", ("tenant.0.key_sha256.0",)),
        ("max_requests = 3", "max_requests = 0", ("tenant.0.max_requests",)),
        ('certificate_names = ["batch.example", "spiffe://x/batch"]', "", ("nobody could be",)),
        ('"batch.example"', f'"batch.example"]\nkey_sha256 = ["{sha("s1")}"', ("search and batch", "same key")),
        ("[[tenant]]", "[[tenant]", ("not valid TOML", "line")),
        (GOOD, "", ("tenant",)),
    ],
)
def test_bad_files_are_told_without_their_secrets(tmp_path: Path, old: str, new: str, words: tuple[str, ...]) -> None:
    assert old in GOOD
    text = GOOD.replace(old, new, 1)
    if "same key" in words:
        text = text.replace(', "spiffe://x/batch"]', "]")
    with pytest.raises(BadTenants) as caught:
        read_tenants(write(tmp_path, text))
    assert all(word in str(caught.value) for word in words), caught.value
    assert "secret-key" not in str(caught.value)
    assert sha("s1") not in str(caught.value)


def test_a_missing_and_a_binary_file(tmp_path: Path) -> None:
    with pytest.raises(BadTenants, match="No such file"):
        read_tenants(tmp_path / "none")
    (tmp_path / "tenants.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(BadTenants, match="UTF-8"):
        read_tenants(tmp_path / "tenants.toml")


def test_the_file_is_read_again_and_a_bad_change_keeps_the_table(tmp_path: Path) -> None:
    file = write(tmp_path, GOOD)
    table = table_source(file, [bytes.fromhex(sha("plain"))])
    assert table().by_key("plain") is ANONYMOUS
    write(tmp_path, GOOD.replace("weight = 4", "weight = 40"))
    assert table().by_key("s1").weight == 40  # type: ignore[union-attr]
    write(tmp_path, "nonsense")
    assert table().by_key("s1").weight == 40  # type: ignore[union-attr]
    write(tmp_path, GOOD.replace(sha("s1"), sha("new")))
    assert table().by_key("s1") is None
    assert table().by_key("plain") is ANONYMOUS


def test_who_is_it(tmp_path: Path) -> None:
    table = read_tenants(write(tmp_path, GOOD))
    gate = Gate(lambda: table, Quotas(lambda: 0.0, 8))

    def named(authorization: list[str], certificate: list[str]) -> str | Refusal:
        found = gate.identify(authorization, certificate)
        return found if isinstance(found, Refusal) else found.name

    assert named(["Bearer s1"], []) == "search"
    assert named(["bearer  s2 "], ["batch.example"]) == "search"
    assert named([], ["batch.example"]) == "batch"
    assert named(["Bearer no"], ["batch.example"]) is BAD_KEY
    assert named(["Bearer s1", "Bearer s2"], []) is BAD_KEY
    assert named(["Basic s1"], []) is MISSING_KEY
    assert named([], ["stranger"]) is MISSING_KEY
    assert Gate(TenantTable, Quotas(lambda: 0.0, 8)).identify(["Bearer x"], []) is ANONYMOUS


@pytest.mark.parametrize(("asked", "found"), [(None, 2), (2, 2), (9, 9), (1, None), (10, None), (-(2**31), None)])
def test_priorities(asked: int | None, found: int | None) -> None:
    answer = Tenant("a", priority=2, min_priority=2, max_priority=9).resolve_priority(asked)
    if found is not None:
        assert answer == found
        return
    assert isinstance(answer, Refusal)
    assert answer.code is RefusalCode.INVALID_ARGUMENT
    assert "2..9" in answer.message


SALTS = st.none() | st.text(max_size=20) | st.sampled_from(["tenant:a:", "client:", "tenant:", "a", "b:a"])
TENANTS = st.sampled_from(
    [ANONYMOUS, Tenant("a"), Tenant("b"), Tenant("c", share_prefix_cache=True), Tenant("d", share_prefix_cache=True)]
)


@given(TENANTS, SALTS, TENANTS, SALTS)
def test_salts_are_unambiguous(one: Tenant, salt: str | None, other: Tenant, other_salt: str | None) -> None:
    """Equal only for the same salt in the same cache: a tenant's own, or the common one. "" is no salt."""
    mine, its = one.cache_salt(salt) or "", other.cache_salt(other_salt) or ""
    same_cache = one == other or (one.share_prefix_cache and other.share_prefix_cache)
    assert (mine == its) == (same_cache and (salt or "") == (other_salt or ""))
    assert len(mine) <= 256


LIMITED = Tenant("a", limits=TenantLimits(max_requests=2, max_tokens_in_flight=100, tokens_per_minute=600))


def test_requests_at_once() -> None:
    quota = Quota(lambda: 0.0)
    assert quota.enter(LIMITED, 99) is None
    assert quota.enter(LIMITED, 99) is None
    refusal = quota.enter(LIMITED, 99)
    assert refusal is not None
    assert refusal.quota is not None
    assert (refusal.quota.subject, refusal.quota.limit, refusal.retry_after_s) == ("tenant:a", "max_requests", 1.0)
    quota.leave(8.0)
    assert quota.enter(LIMITED, 99) is None
    refusal = quota.enter(LIMITED, 99)
    assert refusal is not None
    assert refusal.retry_after_s == 4.0  # two that take 8 s each
    assert quota.active == 2


def test_places_to_read_count_as_requests_but_say_nothing_of_their_length() -> None:
    quotas = Quotas(lambda: 0.0, 8)
    with quotas.place_to_read(LIMITED) as first, quotas.place_to_read(LIMITED) as second:
        assert (first, second) == (None, None)
        with quotas.place_to_read(LIMITED) as third:
            assert third is not None
        assert quotas.enter(LIMITED) is not None
    assert quotas.of(LIMITED).active == 0
    quotas.enter(LIMITED)
    quotas.of(LIMITED).leave(8.0)
    with quotas.place_to_read(LIMITED), quotas.place_to_read(LIMITED):
        pass
    assert quotas.of(LIMITED).mean_s == 8.0


def test_a_tenant_without_a_limit_leaves_places_to_others() -> None:
    quotas = Quotas(lambda: 0.0, 8)
    taken = 0
    while quotas.enter(Tenant("a")) is None:
        taken += 1
    assert taken == 6
    assert quotas.enter(Tenant("b")) is None
    assert all(quotas.enter(ANONYMOUS) is None for _ in range(8))


def test_tokens_in_flight() -> None:
    quota = Quota(lambda: 0.0)
    assert quota.reserve(LIMITED, 10, 50) is None
    refusal = quota.reserve(LIMITED, 10, 50)
    assert refusal is not None
    assert refusal.code is RefusalCode.RESOURCE_EXHAUSTED
    assert all(number in refusal.message for number in ("60", "100"))
    quota.settle(60, 15)
    assert quota.tokens_in_flight == 0
    assert quota.reserve(LIMITED, 10, 50) is None
    never = quota.reserve(LIMITED, 10, 91)
    assert never is not None
    assert never.code is RefusalCode.INVALID_ARGUMENT
    assert never.violations[0].field == "options.sampling.max_tokens"


def test_tokens_per_minute_are_a_bucket_and_what_was_not_generated_goes_back() -> None:
    now = 0.0
    tenant = replace(LIMITED, limits=TenantLimits(tokens_per_minute=600))
    quota = Quota(lambda: now)
    assert quota.reserve(tenant, 100, 400) is None
    refusal = quota.reserve(tenant, 100, 100)
    assert refusal is not None
    assert refusal.retry_after_s == pytest.approx(10.0)  # 100 are missing, 10 come in a second
    quota.settle(500, 150)  # 350 go back
    assert quota.reserve(tenant, 100, 350) is None
    assert quota.reserve(tenant, 1, 0) is not None
    now = 30.0
    assert quota.reserve(tenant, 300, 0) is None
    now = 1e6
    assert quota.reserve(tenant, 300, 300) is None
    refusal = quota.reserve(tenant, 1, 0)
    assert refusal is not None
    assert refusal.retry_after_s == pytest.approx(0.1)
    never = quota.reserve(tenant, 1, 600)
    assert never is not None
    assert never.code is RefusalCode.INVALID_ARGUMENT


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 300), st.floats(0, 30)), max_size=40))
def test_never_more_tokens_than_the_bucket_and_its_filling(calls: list[tuple[int, int, float]]) -> None:
    now, taken = 0.0, 0
    tenant = replace(LIMITED, limits=TenantLimits(tokens_per_minute=600))
    quota = Quota(lambda: now)
    for prompt, completion, pause in calls:
        now += pause
        if quota.reserve(tenant, prompt, completion) is None:
            taken += prompt + completion
        assert taken <= 600 + 10 * now + 1e-6

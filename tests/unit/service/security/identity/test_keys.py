"""An issuer's keys: which are taken, when they are fetched, and what stays when they cannot be had."""

import asyncio
import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from structlog.testing import capture_logs

from muster.service.security.files import FileError
from muster.service.security.identity import keys
from muster.service.security.identity.fetching import FetchError
from muster.service.security.identity.jwks import parse
from muster.service.security.identity.keys import (
    PAUSE,
    REFRESH,
    FetchedKeys,
    KeysInFile,
    KeysUnavailable,
    KeyUnknown,
)
from tests.support.issuer import Issuer, jwks, key, public_jwk

FIRST, SECOND = Issuer(kid="first"), Issuer(kid="second")
BOTH = jwks(public_jwk("first", FIRST.private), public_jwk("second", SECOND.private))


# ---------------------------------------------------------------------- what a set may hold


def test_keys_of_other_kinds_are_passed_over():
    small = rsa.generate_private_key(public_exponent=65_537, key_size=1_024)
    other_curve = ec.generate_private_key(ec.SECP384R1())
    good = public_jwk("good", key("rsa", "RSA"))
    found = parse(
        jwks(
            public_jwk("small", small),
            {**public_jwk("curve", other_curve), "alg": None},
            {**good, "kid": "for-encryption", "use": "enc"},
            {**good, "kid": "of-512", "alg": "RS512"},
            {"kty": "oct", "k": "c2VjcmV0", "kid": "shared", "alg": "HS256"},
            {"kty": "RSA", "kid": "broken", "n": "AQAB"},
            {"kty": ["RSA"], "kid": "no-text"},
            {**good, "kid": 7},
            good,
        )
    )
    assert found.ids == {None, "good"}
    assert {one.algorithm for _, one in found.keys} == {"RS256"}


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "it is empty"),
        (BOTH[: len(BOTH) // 2], "it is not JSON"),
        (b"\xff\xfe", "it is not JSON"),
        (b"[" * 100_000, "it is not JSON"),
        (b"[]", "it is not a JWKS"),
        (b'{"keys": {}}', "it is not a JWKS"),
        (b'{"keys": []}', "none of its 0 keys"),
        (b'{"keys": [1, "x", null]}', "none of its 3 keys"),
        (json.dumps({"keys": [{**public_jwk("first", FIRST.private), "d": "AQAB"}]}).encode(), "private key"),
    ],
)
def test_invalid_key_set_is_refused_with_a_reason(data: bytes, why: str):
    with pytest.raises(ValueError, match=why):
        parse(data)


def test_token_without_a_key_id_is_of_the_only_key():
    assert parse(FIRST.jwks).find(None) is not None
    assert parse(BOTH).find(None) is None


# ---------------------------------------------------------------------- keys in a file


async def test_file_that_is_being_replaced_keeps_the_last_good_keys(tmp_path: Path):
    file = tmp_path / "keys.json"
    FIRST.publish(file)
    followed = KeysInFile(file)
    for broken in (b"", BOTH[:100], None):
        file.unlink() if broken is None else file.write_bytes(broken)
        with capture_logs() as logged:
            followed.refresh()
            followed.refresh()
        assert [line["event"] for line in logged] == ["keys.kept"]
        assert str(file) in logged[0]["reason"]
        await followed.find("first")
    SECOND.publish(file)
    followed.refresh()
    await followed.find("second")
    with pytest.raises(KeyUnknown, match=r"is not among the 1 of .*keys\.json"):
        await followed.find("first")
    followed.close()


@pytest.mark.parametrize("text", [None, "", "{}"])
def test_file_of_no_use_at_the_start_is_an_error(tmp_path: Path, text: str | None):
    file = tmp_path / "keys.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(FileError, match=r"keys\.json"):
        KeysInFile(file)


# ---------------------------------------------------------------------- keys that are fetched


class Source:
    """Answers what the test wants, when it wants."""

    def __init__(self) -> None:
        self.now = 0.0
        self.answers: bytes | Exception = FIRST.jwks
        self.asked = 0
        self.open = asyncio.Event()
        self.open.set()
        self.keys = FetchedKeys("cluster", "https://keys", self.fetch, lambda: self.now)

    async def fetch(self) -> bytes:
        self.asked += 1
        await self.open.wait()
        if isinstance(self.answers, Exception):
            raise self.answers
        return self.answers

    async def refresh(self) -> None:
        self.keys.refresh()
        for _ in range(3):
            await asyncio.sleep(0)


async def test_keys_are_fetched_once_for_all_waiting_calls():
    source = Source()
    source.open.clear()
    waiting = [asyncio.create_task(source.keys.find("first")) for _ in range(50)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    source.open.set()
    found = await asyncio.gather(*waiting[1:])
    assert len(set(map(id, found))) == 1
    assert source.asked == 1


async def test_no_more_wait_than_may(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(keys, "MAX_WAITING", 2)
    source = Source()
    source.open.clear()
    waiting = [asyncio.create_task(source.keys.find("first")) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(KeysUnavailable, match="2 calls wait for it already"):
        await source.keys.find("first")
    source.open.set()
    await asyncio.gather(*waiting)


async def test_flood_of_unknown_keys_fetches_at_a_bounded_rate():
    source = Source()
    await source.refresh()
    for second in range(100):
        source.now = float(second)
        for number in range(20):
            with pytest.raises((KeyUnknown, KeysUnavailable)):
                await source.keys.find(f"made-up-{number}")
        # A token with a known key is not affected.
        await source.keys.find("first")
    assert source.asked == 100 / PAUSE


async def test_new_key_is_found_at_once_or_after_a_pause():
    source = Source()
    await source.refresh()
    source.now = 1.0
    source.answers = BOTH
    with pytest.raises(KeysUnavailable, match="was asked a moment ago"):
        await source.keys.find("second")
    source.now = PAUSE
    await source.keys.find("second")
    source.now = 3 * PAUSE
    with pytest.raises(KeyUnknown, match="is not among the 2 of https://keys"):
        await source.keys.find("third")
    with pytest.raises(KeyUnknown, match="names no key"):
        await source.keys.find(None)


async def test_last_known_keys_stay_while_the_source_cannot_be_reached():
    source = Source()
    await source.refresh()
    with capture_logs() as logged:
        for broken in (FetchError("https://keys cannot be reached"), b"{}", b"{}"):
            source.now += REFRESH
            source.answers = broken
            await source.refresh()
            await source.keys.find("first")
            with pytest.raises(KeysUnavailable, match="https://keys"):
                await source.keys.find("second")
    assert [(line["event"], line["log_level"]) for line in logged] == [("keys.unavailable", "error")] * 2
    assert "The last known stay in force" in logged[0]["reason"]
    source.answers = BOTH
    source.now += PAUSE
    with capture_logs() as logged:
        await source.refresh()
    assert [(line["event"], line["keys"]) for line in logged] == [("keys.fetched", 2)]
    await source.keys.find("second")


async def test_withdrawn_keys_are_dropped():
    source = Source()
    await source.refresh()
    source.answers = SECOND.jwks
    source.now = REFRESH - 1
    await source.refresh()
    await source.keys.find("first")
    source.now = REFRESH
    await source.refresh()
    with pytest.raises(KeysUnavailable):
        await source.keys.find("first")


async def test_without_keys_from_the_start_on_the_refusal_says_so():
    source = Source()
    source.answers = FetchError("https://keys cannot be reached: refused")
    with capture_logs() as logged:
        await source.refresh()
        with pytest.raises(KeysUnavailable, match="cannot be reached: refused"):
            await source.keys.find("first")
    assert "Until then its tokens are refused" in logged[0]["reason"]
    source.answers = FIRST.jwks
    source.now = PAUSE
    await source.keys.find("first")
    assert source.asked == 2


async def test_waiting_call_is_refused_when_the_issuer_is_dropped():
    source = Source()
    source.open.clear()
    waiting = asyncio.create_task(source.keys.find("first"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    source.keys.close()
    with pytest.raises(KeysUnavailable, match="not asked any more"):
        await waiting

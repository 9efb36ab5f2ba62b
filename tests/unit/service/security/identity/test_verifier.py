"""Tokens that an issuer signs: which are good, and what is said of each that is not."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from muster.service.core.vocabulary.refusal import Reason, Refusal
from muster.service.security import access
from muster.service.security.access import Access
from muster.service.security.grants import Grant, Role
from muster.service.security.identity import verifier
from muster.service.security.identity.refusals import UNKNOWN, TokenRefused
from muster.service.security.identity.rules import FetchedFrom, Login, ServiceAccounts
from muster.service.security.identity.rules import Issuer as Trusted
from muster.service.security.identity.verifier import Verifier
from muster.service.security.journal import Journal
from muster.service.security.tokens import Tokens
from tests.support.issuer import URL, Issuer, forged, jwks, key, public_jwk, public_pem

NOW = 1_700_000_000.0
GET, EVICT, CONNECT = (
    f"/muster.v1.{name}" for name in ("RunService/Get", "RunService/Evict", "SessionService/Connect")
)
ISSUER = Issuer()
OF_RSA = Issuer(kid="rsa", private=key("rsa", "RSA"))


class Room:
    """A coordinator's checks, with a clock in the test's hand."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(jwks(public_jwk("first", ISSUER.private), public_jwk("rsa", OF_RSA.private)))
        self.now = NOW
        self.tokens = Tokens(
            (),
            (Trusted(name="cluster", url=URL, keys=path, leeway=10.0),),
            (
                ServiceAccounts(
                    issuer="cluster", namespace="team-a", account="*", role=Role.WORKER, runs=("team-a-*",)
                ),
                Login(issuer="cluster", claims={"groups": "ops"}, role=Role.OPERATOR, runs=("*",)),
            ),
        )
        self.verifier = Verifier(lambda: self.now, lambda: self.now)
        self.verifier.set_issuers(self.tokens.issuers)
        self.access = Access(lambda: self.tokens, self.verifier, lambda: self.now)

    def admit(self, token: str, method: str = CONNECT) -> Grant:
        return asyncio.run(self.access.admit(method, (("authorization", f"Bearer {token}"),)))


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Room:
    monkeypatch.setattr(access, "JOURNAL", Journal())
    return Room(tmp_path / "keys.json")


def refused(room: Room, token: str, method: str = CONNECT) -> tuple[TokenRefused, dict[str, Any]]:
    """The refusal, and its line in the log; no part of the token is in either."""
    with capture_logs() as logged, pytest.raises(TokenRefused) as caught:
        room.admit(token, method)
    assert [line["event"] for line in logged] == ["token.refused"]
    for part in [part for part in token.split(".") if len(part) > 8]:
        assert part not in str(logged) + str(caught.value.message)
    return caught.value, dict(logged[0])


@pytest.mark.parametrize("issuer", [ISSUER, OF_RSA], ids=["ES256", "RS256"])
def test_good_token_is_a_grant_of_its_account(room: Room, issuer: Issuer):
    found = room.admit(issuer.token("team-a/trainer", now=NOW))
    assert (found.name, found.role, found.runs) == ("team-a/trainer", Role.WORKER, ("team-a-*",))
    assert found.claims is not None
    assert (found.claims.expires_at, found.claims.ends_at) == (NOW + 600, NOW + 610)


def test_login_is_known_by_a_claim(room: Room):
    token = ISSUER.token(now=NOW, sub="ann", groups=["dev", "ops"])
    assert room.admit(token, EVICT).role is Role.OPERATOR


def test_clocks_may_be_apart_by_the_leeway(room: Room):
    room.admit(ISSUER.token(now=NOW + 9.9))
    room.now = NOW + 609.9
    room.admit(ISSUER.token(now=NOW))


CLAIMS = {"iss": URL, "aud": "muster", "sub": "system:serviceaccount:team-a:trainer", "exp": NOW + 600}


@pytest.mark.parametrize(
    ("token", "check", "why"),
    [
        (forged({"alg": "none"}, CLAIMS), "alg", "signed with none, not RS256 or ES256"),
        (
            forged({"alg": "HS256", "kid": "rsa"}, CLAIMS, public_pem(OF_RSA.private)),
            "alg",
            "signed with HS256",
        ),
        (forged({"alg": "RS256", "kid": "rsa"}, CLAIMS, public_pem(OF_RSA.private)), "signature", "its sign"),
        (
            OF_RSA.token(now=NOW, headers={"kid": "first"}),
            "alg",
            "its key is for ES256, and it names another",
        ),
        (Issuer(private=key("thief")).token(now=NOW), "signature", "its signature is not of the key"),
        (ISSUER.token(now=NOW, headers={"kid": "other"}), "kid", "is not among the 2 of"),
        (Issuer(kid="", private=ISSUER.private).token(now=NOW), "kid", "it names no key (kid), and"),
        (ISSUER.token(now=NOW, headers={"crit": ["b64"], "b64": True}), "", ""),
        (Issuer("https://other").token(now=NOW), "issuer", "its issuer (iss) is https://other, and no"),
        (ISSUER.token(now=NOW, iss=None), "issuer", "no [[issuer]] has that url"),
        (ISSUER.token(now=NOW, exp=None), "exp", "it has no exp"),
        (ISSUER.token(now=NOW, aud=None), "aud", "it has no aud"),
        (ISSUER.token(now=NOW, sub=None), "sub", "it has no sub"),
        (ISSUER.token(now=NOW, iat=NOW, nbf="soon"), "nbf", "its nbf is no number"),
        (ISSUER.token(now=NOW, pad="x" * 7_000), "size", "7,000 are the most"),
        ("a.b.c", "shape", "cannot be read as a JWT"),
        ("no-jwt-at-all-0123456789", "shape", "not a JWT"),
        ("é.ü.ö", "shape", "not a JWT"),
        (f"{'e30.' * 1500}e30", "shape", "not a JWT"),
    ],
)
def test_only_the_log_explains_why_an_untrusted_token_is_refused(
    room: Room, token: str, check: str, why: str
):
    refusal, line = refused(room, token)
    assert refusal.reason is Reason.TOKEN_UNKNOWN
    assert refusal.message == UNKNOWN
    assert check in line["check"]
    assert why in line["message"]
    assert line["reason"] == "TOKEN_UNKNOWN"


@pytest.mark.parametrize("number", ["1e400", "-1e400", "true", '"soon"', "1e300", "NaN"])
def test_expiry_that_is_no_time_is_refused(room: Room, number: str):
    value = {"true": True, '"soon"': "soon"}.get(number)
    refusal, _ = refused(room, ISSUER.token(now=NOW, exp=float(number) if value is None else value))
    assert refusal.reason is Reason.TOKEN_UNKNOWN


@pytest.mark.parametrize(
    ("token", "reason", "check", "said"),
    [
        (ISSUER.token(now=NOW, aud=["vault"]), "TOKEN_UNKNOWN", "aud", 'for another audience than "muster"'),
        (
            ISSUER.token(now=NOW - 700),
            "TOKEN_EXPIRED",
            "exp",
            "the token of team-a/trainer expired 100 s ago, at 2023-11-14 22:11:40Z, and this one is shown "
            "still: it was not rotated",
        ),
        (
            ISSUER.token(now=NOW + 60),
            "TOKEN_UNKNOWN",
            "nbf",
            "not valid before 2023-11-14 22:14:20Z, and here",
        ),
        (ISSUER.token(now=NOW + 60, nbf=None), "TOKEN_UNKNOWN", "iat", "Compare the clocks"),
        (
            ISSUER.token("team-b/trainer", now=NOW),
            "TOKEN_UNKNOWN",
            "rules",
            "team-b/trainer has no grant at this coordinator",
        ),
        (ISSUER.token(now=NOW, sub="system:serviceaccount:team-a"), "TOKEN_UNKNOWN", "rules", "has no grant"),
        (
            ISSUER.token(now=NOW, sub="x:system:serviceaccount:team-a:b"),
            "TOKEN_UNKNOWN",
            "rules",
            "has no grant",
        ),
        (ISSUER.token("team-a/a:b", now=NOW), "TOKEN_UNKNOWN", "rules", "has no grant"),
    ],
)
def test_bearer_of_a_verified_token_hears_what_to_do(
    room: Room, token: str, reason: str, check: str, said: str
):
    refusal, line = refused(room, token)
    assert (refusal.reason.name, line["check"], line["issuer"]) == (reason, check, "cluster")
    assert said in refusal.message
    assert line["message"] == refusal.message


def test_role_and_runs_are_checked_as_those_of_any_token(room: Room):
    found = room.admit(ISSUER.token(now=NOW))
    with capture_logs() as logged:
        with pytest.raises(Refusal) as caught:
            room.admit(ISSUER.token(now=NOW), EVICT)
        assert caught.value.reason is Reason.ROLE_TOO_LOW
        with pytest.raises(Refusal) as caught:
            access.check_run(found, "team-b-1")
        assert caught.value.reason is Reason.RUN_NOT_ALLOWED
    assert [(line["check"], line["reason"]) for line in logged] == [
        ("role", "ROLE_TOO_LOW"),
        ("run", "RUN_NOT_ALLOWED"),
    ]
    access.check_run(found, "team-a-1")


def test_watcher_token_without_a_node_is_refused_with_an_explanation(room: Room):
    rule = ServiceAccounts(
        issuer="cluster", namespace="muster", account="watcher", role=Role.WATCHER, runs=("*",)
    )
    later = replace(rule, role=Role.VIEWER)
    room.tokens = Tokens((), room.tokens.issuers, (rule, later))
    refusal, line = refused(room, ISSUER.token("muster/watcher", now=NOW))
    assert refusal.reason is Reason.TOKEN_UNKNOWN
    assert "the token of muster/watcher names no node, and a watcher's must" in refusal.message
    assert (line["check"], line["issuer"], line["message"]) == ("node", "cluster", refusal.message)
    bound: dict[str, Any] = {"kubernetes.io": {"node": {"name": "node-1", "uid": "1"}}}
    drain = "/muster.v1.RunService/DrainNode"
    found = room.admit(ISSUER.token("muster/watcher", now=NOW, **bound), drain)
    assert (found.name, found.nodes) == ("muster/watcher", ("node-1",))
    # What the rule says counts, whether or not the token names a node.
    room.tokens = Tokens((), room.tokens.issuers, (replace(rule, nodes=("*",)),))
    assert room.admit(ISSUER.token("muster/watcher", now=NOW), drain).nodes == ("*",)


def test_account_of_another_issuer_has_no_grant(room: Room, tmp_path: Path):
    """The operator of the second issuer may put any claims into its tokens."""
    other = Issuer("https://other", "other")
    other.publish(tmp_path / "other.json")
    trusted = Trusted(name="other", url="https://other", keys=tmp_path / "other.json")
    room.tokens = Tokens((), (*room.tokens.issuers, trusted), room.tokens.rules)
    room.verifier.set_issuers(room.tokens.issuers)
    refusal, line = refused(room, other.token(now=NOW))
    assert (line["check"], line["issuer"]) == ("rules", "other")
    assert "has no grant" in refusal.message
    # Nor do the keys of one vouch for the other.
    _, line = refused(room, Issuer(URL, "other").token(now=NOW))
    assert (line["check"], line["issuer"]) == ("kid", "cluster")


async def test_token_is_refused_if_its_issuer_is_dropped_during_a_fetch(
    room: Room, monkeypatch: pytest.MonkeyPatch
):
    begun, end = asyncio.Event(), asyncio.Event()

    async def fetch(_: FetchedFrom) -> bytes:
        begun.set()
        await end.wait()
        return ISSUER.jwks

    monkeypatch.setattr(verifier, "fetch", fetch)
    (trusted,) = room.tokens.issuers
    room.verifier.set_issuers((replace(trusted, keys=FetchedFrom(url="https://keys")),))
    waiting = asyncio.create_task(room.verifier.verify(ISSUER.token(now=NOW)))
    await begun.wait()
    # What was asked for is there before it can be stopped.
    end.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    room.verifier.set_issuers(())
    with pytest.raises(TokenRefused) as caught:
        await waiting
    assert caught.value.check in ("issuer", "keys")


# ---------------------------------------------------------------------- tokens that are shown again


def test_token_that_was_good_is_not_examined_again_but_its_times_are(
    room: Room, monkeypatch: pytest.MonkeyPatch
):
    token = ISSUER.token(now=NOW)
    first = room.admit(token)
    monkeypatch.setattr(verifier, "_signed", None)
    assert room.admit(token) == first
    room.now = NOW + 611
    refusal, _ = refused(room, token)
    assert refusal.reason is Reason.TOKEN_EXPIRED


def test_token_is_good_no_longer_than_its_key(room: Room, tmp_path: Path):
    token = ISSUER.token(now=NOW)
    room.admit(token)
    OF_RSA.publish(tmp_path / "keys.json")
    room.verifier.refresh()
    assert refused(room, token)[1]["check"] == "kid"
    # Nor is it good with another key of the same name.
    Issuer(private=key("thief")).publish(tmp_path / "keys.json")
    room.verifier.refresh()
    assert refused(room, token)[1]["check"] == "signature"


def test_token_is_good_no_longer_than_its_issuer_is_trusted(room: Room):
    token = ISSUER.token(now=NOW)
    room.admit(token)
    (trusted,) = room.tokens.issuers
    room.verifier.set_issuers((replace(trusted, audience="other"),))
    assert refused(room, token)[1]["check"] == "aud"
    room.verifier.set_issuers(())
    assert refused(room, token)[1]["check"] == "issuer"


def test_cached_lists_are_bounded(room: Room, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(verifier, "MAX_REMEMBERED", 2)
    tokens = [ISSUER.token(now=NOW, jti=str(number)) for number in range(3)]
    for token in (*tokens, tokens[1]):
        room.admit(token)
    assert len(room.verifier._good) == 2
    room.admit(tokens[0])
    monkeypatch.setattr(verifier, "_signed", None)
    room.admit(tokens[1])


# ---------------------------------------------------------------------- what is open when a token ends


async def test_call_ends_when_its_token_does(room: Room, monkeypatch: pytest.MonkeyPatch):
    token = ISSUER.token(now=NOW, seconds=5)
    grant = await room.access.admit(CONNECT, (("authorization", f"Bearer {token}"),))
    room.now = NOW + 14.98  # The leeway counts for open calls, too.
    with capture_logs() as logged, pytest.raises(TokenRefused) as caught:
        async with room.access.while_granted(grant):
            await asyncio.Event().wait()
    assert caught.value.reason is Reason.TOKEN_EXPIRED
    assert caught.value.message == (
        "the token of team-a/trainer expired at 2023-11-14 22:13:25Z, and what was opened with it ends. "
        "Connect again with the one that has replaced it: the SDK does, and reads MUSTER_TOKEN_FILE again."
    )
    assert [line["check"] for line in logged] == ["exp"]


async def test_changed_rule_ends_only_calls_that_it_had_granted(room: Room):
    def grant_of(account: str) -> Any:
        token = ISSUER.token(account, now=NOW)
        return room.access.admit(CONNECT, (("authorization", f"Bearer {token}"),))

    trainer, other = await grant_of("team-a/trainer"), await grant_of("team-a/other")
    ended = asyncio.Event()

    async def call(grant: Grant) -> None:
        async with room.access.while_granted(grant):
            await ended.wait()

    calls = [asyncio.create_task(call(one)) for one in (trainer, other)]
    await asyncio.sleep(0)
    room.access.revoke(room.tokens)
    await asyncio.sleep(0)
    assert not any(one.done() for one in calls)
    (trusted,) = room.tokens.issuers
    assert room.tokens.is_still_valid(other)
    changed = (
        replace(trusted, url="https://other"),
        replace(trusted, audience="other"),
        replace(trusted, name="other"),
    )
    for one in changed:
        assert not Tokens((), (one,), room.tokens.rules).is_still_valid(other)
    narrower = ServiceAccounts(
        issuer="cluster", namespace="team-a", account="trainer", role=Role.VIEWER, runs=("*",)
    )
    room.access.revoke(Tokens((), room.tokens.issuers, (narrower, *room.tokens.rules)))
    with pytest.raises(TokenRefused) as caught:
        await calls[0]
    assert caught.value.reason is Reason.TOKEN_UNKNOWN
    assert not calls[1].done()
    ended.set()
    await calls[1]

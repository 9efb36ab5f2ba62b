"""The checks at a relay's port, and the calls that it forwards."""

import asyncio
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import pytest

from muster.relay.refusals import Refused, info_of, upstream_lost
from muster.service.app.relay_callers import REQUESTS, RelayAuthenticator
from muster.service.rpc.server import METHODS
from muster.service.security.access import RULES, Access
from muster.service.security.audit import Fields
from muster.service.security.config import TrafficLimits
from muster.service.security.grants import Grant, Role
from muster.service.security.tokens import Tokens
from muster.service.security.traffic import Traffic
from muster.v1 import store_pb2

CONNECT = "/muster.v1.SessionService/Connect"
OPERATE = "/muster.v1.StoreService/Operate"
SET = "/muster.v1.StoreService/Set"
GET = "/muster.v1.StoreService/Get"
PEER = "ipv4:10.0.0.7:1"
SECRETS = {role: f"{role.name.lower()}-0123456789" for role in Role}


@dataclass(frozen=True, slots=True)
class FakeCall:
    """A call without TLS, as the relay sees it."""

    metadata: Iterable[tuple[str, str | bytes]] = ()
    address: str = PEER

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]]:
        return self.metadata

    def peer(self) -> str:
        return self.address

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        return {}


def granted(*runs: str, roles: tuple[Role, ...] = tuple(Role)) -> Tokens:
    return Tokens(
        tuple(
            Grant(
                name=role.name.lower(),
                role=role,
                runs=runs or ("*",),
                digest=hashlib.sha256(SECRETS[role].encode()).digest(),
            )
            for role in roles
        )
    )


def bearing(role: Role) -> list[tuple[str, str | bytes]]:
    return [("user-agent", "x"), ("authorization", f"Bearer {SECRETS[role]}")]


def guard(access: Access | None, **limits: int) -> RelayAuthenticator:
    return RelayAuthenticator(access, Traffic(TrafficLimits(**limits), lambda: 0.0))


def reason_of(refused: Refused) -> str:
    return str(info_of(refused.refusal).reason)


async def outcome(authenticator: RelayAuthenticator, method: str, role: Role, run_id: str = "job") -> str:
    """What becomes of a call: a reason, or OK."""
    try:
        async with authenticator.admit(method, FakeCall(bearing(role))) as caller:
            if method == CONNECT:
                caller.check_run(run_id)
            else:
                request = REQUESTS[method]()
                if "run_id" in request.DESCRIPTOR.fields_by_name:
                    setattr(request, "run_id", run_id)  # noqa: B010  # not every request has one
                caller.check_request(method, request.SerializeToString())
    except Refused as refused:
        return reason_of(refused)
    return "OK"


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ([], "TOKEN_MISSING"),
        ([("authorization", "Basic x")], "TOKEN_MISSING"),
        ([("authorization", b"Bearer x")], "TOKEN_MISSING"),
        ([("authorization", "Bearer unknown")], "TOKEN_UNKNOWN"),
    ],
)
async def test_caller_without_a_token_is_refused(metadata: list[tuple[str, str | bytes]], reason: str):
    authenticator = guard(Access(granted))
    with pytest.raises(Refused) as caught:
        async with authenticator.admit(CONNECT, FakeCall(metadata)):
            raise AssertionError("it was let in")
    assert reason_of(caught.value) == reason


@pytest.mark.parametrize("method", sorted(REQUESTS))
async def test_relay_forwards_only_calls_of_workers(method: str):
    """Whatever the caller may do: the relay's own token stands for it, and would show its own runs."""
    authenticator = guard(Access(granted))
    rule = RULES[method]
    expected = "OK" if rule.role <= Role.WORKER and not rule.shows else "ROLE_TOO_LOW"
    assert await outcome(authenticator, method, Role.WORKER) == expected
    assert await outcome(authenticator, method, Role.OPERATOR) == expected
    looks = rule.role is Role.VIEWER
    assert await outcome(authenticator, method, Role.WATCHER) == (expected if looks else "ROLE_TOO_LOW")
    assert await outcome(authenticator, method, Role.VIEWER) == (expected if looks else "ROLE_TOO_LOW")


def test_all_that_a_worker_may_call_can_be_read():
    assert {method for method in METHODS if RULES[method].role is Role.WORKER} <= set(REQUESTS)


@pytest.mark.parametrize("method", [CONNECT, SET])
async def test_run_that_is_not_the_tokens_is_refused(method: str):
    authenticator = guard(Access(lambda: granted("a-*")))
    assert await outcome(authenticator, method, Role.WORKER, "a-1") == "OK"
    assert await outcome(authenticator, method, Role.WORKER, "b-1") == "RUN_NOT_ALLOWED"
    assert await outcome(authenticator, method, Role.WORKER, "") == "RUN_NOT_ALLOWED"


@pytest.mark.parametrize(
    ("method", "data", "reason"),
    [
        (SET, b"\xff", "INVALID_ARGUMENT"),
        ("/muster.v1.StoreService/Unheard", b"", "ROLE_TOO_LOW"),
        ("/muster.v1.", b"", "ROLE_TOO_LOW"),
    ],
)
async def test_unparsable_request_is_not_forwarded(method: str, data: bytes, reason: str):
    async with guard(Access(granted)).admit(SET, FakeCall(bearing(Role.OPERATOR))) as caller:
        with pytest.raises(Refused) as caught:
            caller.check_request(method, data)
    assert reason_of(caught.value) == reason
    assert SECRETS[Role.OPERATOR] not in str(caught.value)


async def test_audit_log_has_refusals_sessions_and_forwarded_changes():
    entries: list[Fields] = []
    traffic = Traffic(TrafficLimits(), lambda: 0.0)
    authenticator = RelayAuthenticator(Access(lambda: granted("a-*")), traffic, entries.append)
    for method, run_id in ((SET, "a-1"), (GET, "a-1"), (SET, "b-1"), (CONNECT, "a-1"), (CONNECT, "b-1")):
        await outcome(authenticator, method, Role.WORKER, run_id)
    await outcome(authenticator, SET, Role.VIEWER, "a-1")
    assert [(one["who"], one["call"], one["run"], one["result"]) for one in entries] == [
        ("worker", SET, "a-1", "FORWARDED"),
        ("worker", SET, "b-1", "RUN_NOT_ALLOWED"),
        ("worker", CONNECT, "a-1", "OPEN"),
        ("worker", CONNECT, "a-1", "OK"),
        ("worker", CONNECT, "", "RUN_NOT_ALLOWED"),
        ("viewer", SET, "", "ROLE_TOO_LOW"),
    ]
    assert {one["from"] for one in entries} == {PEER}


async def test_audit_log_has_the_end_of_a_session():
    entries: list[Fields] = []
    authenticator = RelayAuthenticator(None, Traffic(TrafficLimits(), lambda: 0.0), entries.append)
    for end in (asyncio.CancelledError(), Refused(upstream_lost("it is away"))):
        with pytest.raises(type(end)):
            async with authenticator.admit(CONNECT, FakeCall()) as caller:
                caller.check_run("a-1")
                raise end
    assert [(one["who"], one["run"], one["result"]) for one in entries] == [
        ("", "a-1", "OPEN"),
        ("", "a-1", "CANCELLED"),
        ("", "a-1", "OPEN"),
        ("", "a-1", "UPSTREAM_LOST"),
    ]


async def test_audit_log_has_each_request_of_a_dialogue_without_tokens():
    entries: list[Fields] = []
    authenticator = RelayAuthenticator(None, Traffic(TrafficLimits(), lambda: 0.0), entries.append)
    async with authenticator.admit(OPERATE, FakeCall()) as caller:
        for key in ("one", "two"):
            entry = store_pb2.KeyValue(key=key, value=b"a secret")
            asked = store_pb2.OperateRequest(set=store_pb2.SetRequest(run_id="a-1", entries=[entry]))
            caller.check_request(OPERATE, asked.SerializeToString())
        caller.check_request(OPERATE, b"\xff")
    assert [(one["run"], one["operation"], one["keys"], one["result"]) for one in entries] == [
        ("a-1", "set", ["one"], "FORWARDED"),
        ("a-1", "set", ["two"], "FORWARDED"),
    ]


async def test_revoked_token_ends_its_calls():
    access = Access(granted)
    inside = asyncio.Event()

    async def stay() -> str:
        try:
            async with guard(access).admit(CONNECT, FakeCall(bearing(Role.WORKER))):
                inside.set()
                await asyncio.Event().wait()
        except Refused as refused:
            return reason_of(refused)
        return "it left"

    staying = asyncio.create_task(stay())
    await inside.wait()
    access.revoke(granted())
    access.revoke(granted(roles=(Role.OPERATOR,)))
    assert await staying == "TOKEN_UNKNOWN"


async def test_relay_bounds_open_streams_of_an_address_and_no_calls():
    authenticator = guard(None, max_sessions_per_peer=1)
    async with authenticator.admit(CONNECT, FakeCall()), authenticator.admit(OPERATE, FakeCall()):
        for method in (CONNECT, OPERATE):
            with pytest.raises(Refused, match="max_sessions_per_peer is 1"):
                async with authenticator.admit(method, FakeCall(address="ipv4:10.0.0.7:2")):
                    raise AssertionError("it was let in")
        async with (
            authenticator.admit(SET, FakeCall()),
            authenticator.admit(CONNECT, FakeCall(address="ipv4:10.0.0.8:1")),
        ):
            pass
    async with authenticator.admit(CONNECT, FakeCall()):
        pass


async def test_relay_hands_messages_on_at_the_rate_of_their_address():
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async def read() -> bytes:
        return b"said"

    limits = TrafficLimits(max_messages_per_second_per_peer=1)
    authenticator = RelayAuthenticator(None, Traffic(limits, lambda: 0.0, sleep))
    async with authenticator.admit(CONNECT, FakeCall()) as caller:
        paced = caller.paced(read)
        assert [await paced(), await paced()] == [b"said"] * 2
    assert slept == [1.0]


def test_requests_are_those_of_the_protos():
    assert REQUESTS[SET] is store_pb2.SetRequest

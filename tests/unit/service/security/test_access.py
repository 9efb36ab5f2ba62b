"""Which role each method asks for, and how a call is checked."""

import asyncio
import hashlib

import pytest
from structlog.testing import capture_logs

from lab.patience import PATIENCE
from muster.service.core.vocabulary.refusal import Reason, Refusal
from muster.service.rpc.server import METHODS, SERVICES
from muster.service.security import access
from muster.service.security.access import OPERATES, RULES, VIEWS, WATCHES, WORKS, Access, Rule
from muster.service.security.grants import Grant, Role
from muster.service.security.journal import Journal
from muster.service.security.tokens import Tokens
from muster.v1 import barrier_pb2, rendezvous_pb2, run_pb2, store_pb2

SECRET = "s3cr3t-0123456789-abcdef"


DRAIN = "/muster.v1.RunService/DrainNode"


def grant(role: Role = Role.WORKER, *runs: str, token: str = SECRET) -> Grant:
    digest = hashlib.sha256(token.encode()).digest()
    return Grant(name="ci", role=role, runs=runs or ("*",), digest=digest)


def guard(*grants: Grant) -> Access:
    return Access(lambda: Tokens(grants))


def bearing(token: str = SECRET) -> tuple[tuple[str, str], ...]:
    return (("user-agent", "x"), ("authorization", f"Bearer {token}"))


def test_every_method_has_a_role():
    """A new method needs a rule."""
    reflection = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    assert set(RULES) == {*METHODS, reflection}


def test_roles_are_those_of_the_documentation():
    assert {method for method, rule in RULES.items() if rule.role is Role.OPERATOR} == {
        "/muster.v1.InsightService/Stacks",
        "/muster.v1.RunService/CancelSave",
        "/muster.v1.RunService/Evict",
        "/muster.v1.RunService/Forget",
        "/muster.v1.RendezvousService/EvictNode",
    }
    assert [method for method, rule in RULES.items() if rule.role is Role.WATCHER] == [DRAIN]
    viewers = {method.removeprefix("/muster.v1.") for method in METHODS if RULES[method].role is Role.VIEWER}
    assert viewers == {
        "RunService/List",
        "RunService/Get",
        "RunService/Members",
        "RunService/Watch",
        "BarrierService/Get",
        "LocalCheckpointService/List",
        "BarrierService/List",
        "RendezvousService/Get",
        "CoordinatorService/Status",
        "CoordinatorService/Replicas",
    }


def test_every_response_about_several_runs_is_filtered():
    """A message that names runs, in answer to a request that names none, or may name none."""
    for service in SERVICES:
        for method in service.methods:
            rule = RULES[f"/{service.full_name}/{method.name}"]
            fields = {
                field.name
                for field in method.output_type.fields
                if field.message_type is not None and "run_id" in field.message_type.fields_by_name
            }
            if rule.shows:
                assert rule.shows in fields
            elif fields and method.name != "Connect":
                # It is about the one run of its request, and that is checked.
                assert "run_id" in method.input_type.fields_by_name


def admit(access: Access, method: str, metadata: tuple[tuple[str, str], ...]) -> Grant:
    return asyncio.run(access.admit(method, metadata))


def refusal_of(call, *arguments) -> Reason:
    with pytest.raises(Refusal) as caught:
        call(*arguments)
    assert SECRET not in caught.value.message
    return caught.value.reason


def test_caller_is_known_by_its_token():
    method = "/muster.v1.RunService/Get"
    mine = grant()
    assert admit(guard(mine), method, bearing()) is mine
    assert refusal_of(admit, guard(mine), method, ()) is Reason.TOKEN_MISSING
    assert refusal_of(admit, guard(mine), method, (("authorization", SECRET),)) is Reason.TOKEN_MISSING
    assert refusal_of(admit, guard(mine), method, bearing("other")) is Reason.TOKEN_UNKNOWN


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize(
    ("rule", "method"), [(VIEWS, "Get"), (WATCHES, "DrainNode"), (WORKS, ""), (OPERATES, "Evict")]
)
def test_role_must_be_high_enough(role: Role, rule: Rule, method: str):
    name = f"/muster.v1.RunService/{method}" if method else "/muster.v1.BarrierService/Abort"
    if role >= rule.role:
        assert admit(guard(grant(role)), name, bearing()).role is role
    else:
        assert refusal_of(admit, guard(grant(role)), name, bearing()) is Reason.ROLE_TOO_LOW


def test_unlisted_method_needs_an_operator():
    method = "/muster.v1.RunService/New"
    assert refusal_of(admit, guard(grant(Role.WORKER)), method, bearing()) is Reason.ROLE_TOO_LOW
    admit(guard(grant(Role.OPERATOR)), method, bearing())


def test_request_must_be_about_an_allowed_run():
    mine = grant(Role.WORKER, "a-*")
    request = run_pb2.RunServiceGetRequest
    access.check_request(mine, VIEWS, request(run_id="a-1"))
    for run_id in ("b", ""):
        assert refusal_of(access.check_request, mine, VIEWS, request(run_id=run_id)) is Reason.RUN_NOT_ALLOWED
    access.check_request(mine, VIEWS, run_pb2.RunServiceListRequest())
    listing = Rule(role=Role.VIEWER, shows="barriers")
    access.check_request(mine, listing, barrier_pb2.BarrierServiceListRequest())
    bad = barrier_pb2.BarrierServiceListRequest(run_id="b")
    assert refusal_of(access.check_request, mine, listing, bad) is Reason.RUN_NOT_ALLOWED


def test_response_leaves_out_runs_of_others():
    mine = grant(Role.VIEWER, "a-*")
    rule = Rule(role=Role.VIEWER, shows="runs")
    runs = [run_pb2.Run(run_id=run_id) for run_id in ("a-1", "b", "a-2")]
    response = run_pb2.RunServiceListResponse(runs=runs)
    assert access.filtered(grant(), rule, response) is response
    shown = access.filtered(mine, rule, response)
    assert shown is not None
    assert [run.run_id for run in shown.runs] == ["a-1", "a-2"]
    rule = Rule(role=Role.VIEWER, shows="run")
    assert access.filtered(mine, rule, run_pb2.WatchResponse(run=runs[0])) is not None
    assert access.filtered(mine, rule, run_pb2.WatchResponse(run=runs[1])) is None


def test_run_id_in_a_refusal_cannot_speak_to_a_terminal():
    with pytest.raises(Refusal) as caught:
        access.check_run(grant(Role.VIEWER, "a"), "\x1b[2J")
    assert "\\x1b[2J" in caught.value.message


# ---------------------------------------------------------------------- nodes


def watcher(*nodes: str, runs: tuple[str, ...] = ("*",)) -> Grant:
    digest = hashlib.sha256(SECRET.encode()).digest()
    return Grant(name="watcher", role=Role.WATCHER, runs=runs, nodes=nodes, digest=digest)


@pytest.mark.parametrize("method", sorted({*RULES} - {DRAIN}))
def test_watcher_may_call_what_a_viewer_may_and_drain_nodes(method: str):
    guarded = guard(watcher("*"))
    assert admit(guarded, DRAIN, bearing()).role is Role.WATCHER
    if RULES[method].role is Role.VIEWER:
        admit(guarded, method, bearing())
    else:
        assert refusal_of(admit, guarded, method, bearing()) is Reason.ROLE_TOO_LOW


@pytest.mark.parametrize(
    ("nodes", "name", "allowed"),
    [
        (("node-1",), "node-1", True),
        (("node-1",), "node-10", False),
        (("node-1",), "node-", False),
        (("node-1",), "node-1\n", False),
        (("node-1",), "node-1\0", False),
        (("node-1",), " node-1", False),
        (("node-1",), "Node-1", False),
        (("node-1",), "node-1.other.example", False),
        (("node-1",), "*", False),
        (("node-1",), "node-?", False),
        (("node-1",), "node-[1]", False),
        (("node-1",), "", False),
        (("gpu-*", "spot-?"), "gpu-7", True),
        (("gpu-*", "spot-?"), "spot-7", True),
        (("gpu-*", "spot-?"), "spot-77", False),
        (("gpu-*",), "gpu-7\n", False),
        (("gpu-*",), "GPU-7", False),
        (("*",), "anything", True),
        (("*",), "*", True),
        (("*",), "", False),
        (("*",), "node-1\x1b[2J", False),
        (("node-[12]",), "node-2", True),
        (("node-[12]",), "node-[12]", False),
        (("node-[[]1]",), "node-[1]", True),
        (("node-1",), "node-1" * 100_000, False),
    ],
)
def test_watcher_names_only_its_own_nodes(nodes: tuple[str, ...], name: str, allowed: bool):
    request = run_pb2.DrainNodeRequest(node_name=name)
    mine = watcher(*nodes)
    if allowed:
        access.check_request(mine, WATCHES, request)
    else:
        assert refusal_of(access.check_request, mine, WATCHES, request) is Reason.NODE_NOT_ALLOWED


@pytest.mark.parametrize("role", [Role.WORKER, Role.OPERATOR])
@pytest.mark.parametrize("name", ["node-1", "any", "", "\n"])
def test_higher_role_names_any_node(role: Role, name: str):
    """The core refuses names that no node can have."""
    access.check_request(grant(role), WATCHES, run_pb2.DrainNodeRequest(node_name=name))
    evict = rendezvous_pb2.EvictNodeRequest(run_id="a", node_name=name)
    access.check_request(grant(role), OPERATES, evict)


def test_viewer_names_no_node():
    """Its role is checked before. This holds without that check, too."""
    request = run_pb2.DrainNodeRequest(node_name="node-1")
    assert refusal_of(access.check_request, grant(Role.VIEWER), WATCHES, request) is Reason.NODE_NOT_ALLOWED


def test_patterns_of_runs_and_of_nodes_hold_together():
    mine = watcher("node-1", runs=("a-*",))
    access.check_request(mine, WATCHES, run_pb2.DrainNodeRequest(node_name="node-1"))
    # A pattern of nodes opens no run, and a pattern of runs opens no node.
    assert not mine.allows("node-1")
    assert not mine.allows_node("a-1")
    both = rendezvous_pb2.EvictNodeRequest(run_id="b-1", node_name="node-1")
    assert refusal_of(access.check_request, mine, OPERATES, both) is Reason.RUN_NOT_ALLOWED
    both = rendezvous_pb2.EvictNodeRequest(run_id="a-1", node_name="node-2")
    assert refusal_of(access.check_request, mine, OPERATES, both) is Reason.NODE_NOT_ALLOWED
    runs = [run_pb2.DrainedRun(run_id=run_id) for run_id in ("a-1", "b")]
    shown = access.filtered(mine, WATCHES, run_pb2.DrainNodeResponse(runs=runs))
    assert shown is not None
    assert [run.run_id for run in shown.runs] == ["a-1"]


def test_refused_node_is_named_with_the_allowed_ones_and_logged(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(access, "JOURNAL", Journal())
    for name, which in (
        ("node-10", "node node-10"),
        ("\x1b[2J", r"node \x1b[2J"),
        ("x" * 5_000, f"node {'x' * 80}…"),
        ("", "a node without a name"),
    ):
        with capture_logs() as logged, pytest.raises(Refusal) as caught:
            access.check_node(watcher("node-1", "spot-*"), name)
        assert caught.value.message == (
            f'token "watcher" is for the nodes node-1, spot-*, and not for {which}. '
            "Use a token for that node, or another node name."
        )
        (line,) = logged
        assert (line["event"], line["reason"], line["check"], line["message"]) == (
            *("token.refused", "NODE_NOT_ALLOWED", "node"),
            caught.value.message,
        )


@pytest.mark.parametrize("nodes", [("node-2",), ("node-1", "node-2"), ()])
async def test_grant_with_changed_nodes_counts_as_revoked(nodes: tuple[str, ...]):
    mine = watcher("node-1")
    checks = guard(mine)
    with pytest.raises(Refusal) as caught:
        async with checks.while_granted(mine):
            checks.revoke(Tokens((watcher(*nodes),)))
            await asyncio.Event().wait()
    assert caught.value.reason is Reason.TOKEN_UNKNOWN


# ---------------------------------------------------------------------- tokens that are taken away


async def test_open_calls_end_when_their_token_is_taken_away_and_no_others():
    mine, other = grant(token=SECRET), grant(token=f"{SECRET}-2")
    checks = guard(mine, other)
    ended = asyncio.Event()

    async def call(one: Grant) -> None:
        async with checks.while_granted(one):
            await ended.wait()

    calls = [asyncio.create_task(call(one)) for one in (mine, mine, other)]
    await asyncio.sleep(0)
    checks.revoke(Tokens((mine, other)))
    await asyncio.sleep(0)
    assert not any(one.done() for one in calls)
    checks.revoke(Tokens((other,)))
    done, _ = await asyncio.wait(calls[:2], timeout=PATIENCE)
    assert len(done) == 2
    for one in done:
        error = one.exception()
        assert isinstance(error, Refusal)
        assert error.reason is Reason.TOKEN_UNKNOWN
    assert not calls[2].done()
    ended.set()
    await calls[2]
    assert checks._open == {}


async def test_call_that_ends_slowly_may_be_revoked_again():
    mine = grant()
    checks = guard(mine)
    with pytest.raises(Refusal):
        async with checks.while_granted(mine):
            checks.revoke(Tokens(()))
            try:
                await asyncio.Event().wait()
            finally:
                checks.revoke(Tokens(()))


async def test_grant_that_changed_counts_as_revoked():
    mine = grant(Role.OPERATOR)
    checks = guard(mine)
    with pytest.raises(Refusal):
        async with checks.while_granted(mine):
            checks.revoke(Tokens((grant(Role.VIEWER),)))
            await asyncio.Event().wait()


async def test_timeout_of_the_call_itself_is_its_own():
    checks = guard(grant())
    with pytest.raises(TimeoutError):
        async with checks.while_granted(grant()):
            raise TimeoutError


def operate(**operation: object) -> store_pb2.OperateRequest:
    return store_pb2.OperateRequest(**operation)  # type: ignore[arg-type]


def of_a_later_version(run_id: str) -> bytes:
    """An operation that only a later version knows: field 15 of the oneof."""
    inner = store_pb2.NumKeysRequest(run_id=run_id).SerializeToString()
    return bytes([15 << 3 | 2, len(inner)]) + inner


def test_operation_names_its_run_itself():
    rule, mine = RULES["/muster.v1.StoreService/Operate"], grant(Role.WORKER, "mine-*")
    access.check_request(mine, rule, operate(num_keys=store_pb2.NumKeysRequest(run_id="mine-1")))
    with pytest.raises(Refusal) as caught:
        access.check_request(mine, rule, operate(num_keys=store_pb2.NumKeysRequest(run_id="other")))
    assert caught.value.reason is Reason.RUN_NOT_ALLOWED


@pytest.mark.parametrize(
    "before", [b"", operate(num_keys=store_pb2.NumKeysRequest(run_id="mine-1")).SerializeToString()]
)
def test_request_of_a_later_version_is_refused_for_limited_tokens(before: bytes):
    """There the last of several operations counts; a relay of this version would have looked at another."""
    rule = RULES["/muster.v1.StoreService/Operate"]
    request = store_pb2.OperateRequest.FromString(before + of_a_later_version("other"))
    access.check_request(grant(), rule, request)
    with pytest.raises(Refusal, match="the run that it is about is not known either") as caught:
        access.check_request(grant(Role.WORKER, "mine-*"), rule, request)
    assert caught.value.reason is Reason.INVALID_ARGUMENT

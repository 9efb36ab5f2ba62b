"""The way to the leader, with small coordinators on loopback."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from lab.processes.coordinator import free_port
from muster.client.credentials import Credentials
from muster.v1 import run_pb2 as pb
from muster.watcher.connection import Connection, CoordinatorError
from muster.watcher.drain import NodeDrain
from muster.watcher.notice import Notice
from tests.support.rich_status import rich_status

NOTICE = Notice(id="test/a", reason="why", deadline=1_100.0)


class Replica:
    """Answers each call, or refuses it.

    Args:
        refusal: of its answers; None: it leads.
    """

    def __init__(self, refusal: grpc.Status | None = None) -> None:
        self.refusal = refusal
        self.heard: list[pb.DrainNodeRequest] = []
        self.authorizations: list[str] = []
        self.endpoint = ""

    async def drain(self, request: pb.DrainNodeRequest, context: Any) -> pb.DrainNodeResponse:
        self.heard.append(request)
        self.authorizations.append(dict(context.invocation_metadata()).get("authorization", ""))
        if self.refusal is not None:
            await context.abort_with_status(self.refusal)
        return pb.DrainNodeResponse(runs=[pb.DrainedRun(run_id="job")])


@asynccontextmanager
async def serving(*replicas: Replica) -> AsyncIterator[None]:
    servers = []
    for replica in replicas:
        server = grpc.aio.server()
        method = grpc.unary_unary_rpc_method_handler(
            replica.drain, pb.DrainNodeRequest.FromString, pb.DrainNodeResponse.SerializeToString
        )
        handler = grpc.method_handlers_generic_handler("muster.v1.RunService", {"DrainNode": method})
        server.add_generic_rpc_handlers((handler,))
        replica.endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        servers.append(server)
    try:
        yield
    finally:
        for server in servers:
            await server.stop(None)


async def sent(*replicas: Replica, more: Sequence[str] = (), seconds: float = 8.0) -> list[str]:
    """Send a notice to these replicas, and return the runs."""
    connection = Connection(",".join([*more, *(one.endpoint for one in replicas)]), seconds)
    try:
        drain = NodeDrain(connection, "node-1", "watcher@node-1", lambda: 1_000.0)
        return [run.run_id for run in await drain(NOTICE)]
    finally:
        await connection.close()


def standby(leader: Replica) -> grpc.Status:
    return rich_status("NOT_LEADER", "another one leads", leader=leader.endpoint, replicas=leader.endpoint)


async def test_leader_answers():
    leader = Replica()
    async with serving(leader):
        assert await sent(leader) == ["job"]
    assert [(one.notice_id, one.deadline_ms) for one in leader.heard] == [("test/a", 100_000)]


async def test_standby_leads_to_the_leader():
    follower, leader = Replica(), Replica()
    async with serving(follower, leader):
        follower.refusal = standby(leader)
        assert await sent(follower) == ["job"]
    assert len(follower.heard) == len(leader.heard) == 1


async def test_address_that_does_not_answer_is_left():
    leader = Replica()
    async with serving(leader):
        assert await sent(leader, more=[f"127.0.0.1:{free_port()}"]) == ["job"]


async def test_refusal_is_not_repeated():
    status = rich_status("NODE_NOT_ALLOWED", "not this node", grpc.StatusCode.PERMISSION_DENIED)
    leader = Replica(status)
    async with serving(leader):
        with pytest.raises(CoordinatorError, match="not this node") as caught:
            await sent(leader)
    assert caught.value.reason == "NODE_NOT_ALLOWED"
    assert len(leader.heard) == 1


async def test_method_that_is_unknown_is_not_repeated():
    leader = Replica()
    async with serving(leader):
        connection = Connection(leader.endpoint)

        async def make(stub: Any, left: float, metadata: Any) -> pb.MembersResponse:
            response: pb.MembersResponse = await stub.Members(pb.MembersRequest(), timeout=left)
            return response

        with pytest.raises(CoordinatorError, match="UNIMPLEMENTED"):
            await connection.call(make)
        await connection.close()


async def test_search_ends_in_time():
    with pytest.raises(CoordinatorError, match="the coordinator did not answer") as caught:
        await sent(more=[f"127.0.0.1:{free_port()}"], seconds=0.5)
    assert caught.value.reason == ""


async def test_failed_call_does_not_end_another_on_its_connection():
    refusal = rich_status("COORDINATOR_DRAINING", "it stops")
    came, may_go = asyncio.Event(), asyncio.Event()

    class Slow(Replica):
        async def drain(self, request: pb.DrainNodeRequest, context: Any) -> pb.DrainNodeResponse:
            number = len(self.heard)
            self.refusal = refusal if number == 1 else None
            if number == 0:
                self.heard.append(request)
                came.set()
                await may_go.wait()
                return pb.DrainNodeResponse(runs=[pb.DrainedRun(run_id="slow")])
            return await super().drain(request, context)

    leader = Slow()
    async with serving(leader):
        connection = Connection(leader.endpoint)
        drain = NodeDrain(connection, "node-1", "by")
        slow = asyncio.create_task(drain(NOTICE))
        await came.wait()
        assert [run.run_id for run in await drain(NOTICE)] == ["job"]
        may_go.set()
        assert [run.run_id for run in await slow] == ["slow"]
        await connection.close()


async def test_token_is_read_for_each_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "token"
    monkeypatch.setenv("MUSTER_TOKEN_FILE", str(file))
    leader = Replica()
    async with serving(leader):
        file.write_text("first")
        await sent(leader)
        file.write_text("second")
        await sent(leader)
    assert leader.authorizations == ["Bearer first", "Bearer second"]


async def test_credentials_may_come_from_elsewhere(tmp_path: Path):
    (tmp_path / "token").write_text("given")
    leader = Replica()
    async with serving(leader):
        connection = Connection(leader.endpoint, credentials=Credentials(token_file=tmp_path / "token"))
        await NodeDrain(connection, "node-1", "by")(NOTICE)
        await connection.close()
    assert leader.authorizations == ["Bearer given"]


async def test_token_that_cannot_be_read_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MUSTER_TOKEN_FILE", str(tmp_path / "none"))
    leader = Replica()
    async with serving(leader):
        with pytest.raises(CoordinatorError, match="MUSTER_TOKEN_FILE"):
            await sent(leader)


async def test_refused_token_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A new token may take a moment to reach the node."""
    file = tmp_path / "token"
    file.write_text("old")
    monkeypatch.setenv("MUSTER_TOKEN_FILE", str(file))
    refusal = rich_status("TOKEN_EXPIRED", "it has expired", grpc.StatusCode.UNAUTHENTICATED)

    class Strict(Replica):
        async def drain(self, request: pb.DrainNodeRequest, context: Any) -> pb.DrainNodeResponse:
            self.refusal = refusal if not self.heard else None
            file.write_text("new")
            return await super().drain(request, context)

    leader = Strict()
    async with serving(leader):
        assert await sent(leader) == ["job"]
    assert leader.authorizations == ["Bearer old", "Bearer new"]

"""What is wrong is said of a relay's socket, its callers and their tokens, and nobody else is disturbed.

What is wrong on a session is in test_bad_input.py, through a relay as well.
"""

import json
import os
import random
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_status import rpc_status

from lab.patience import PATIENCE, until
from lab.processes.coordinator import MUSTER, Coordinator, free_port
from lab.processes.relay import Relay
from muster.v1 import coordinator_pb2, coordinator_pb2_grpc
from muster.v1 import session_pb2 as pb
from tests.integration.security.test_bad_input import Stream, arrive, hello, join
from tests.integration.security.test_fuzz import BOUNDS
from tests.support.grpc_server import serving
from tests.support.hostile.fuzzer import GOOD, SESSION
from tests.support.ranks import Identity, Rank, everyone, ranks
from tests.support.rich_status import reason_of


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short one, for this user alone."""
    with tempfile.TemporaryDirectory(prefix="m-") as name:
        yield Path(name)


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    with Coordinator(tmp_path, session_ttl=3.0) as running:
        yield running


def refused(listen: str, *more: str) -> tuple[int, str]:
    """Exit code and words of a relay that does not begin."""
    command = [str(MUSTER), "relay", f"--listen={listen}", "--upstream=127.0.0.1:1", *more]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    return ended.returncode, " ".join(ended.stderr.split())


def assert_well(relay: Relay) -> None:
    """Nobody speaks through it any more, and nothing broke."""
    for name in ("workers", "processes", "upstream_streams"):
        until(partial(_is_0, relay, f"muster_relay_{name}"), f"{name} are left")
    assert "Traceback" not in relay.log_path.read_text()


def _is_0(relay: Relay, name: str) -> bool:
    return relay.metric(name) == 0


# ---------------------------------------------------------------------- where it listens


def test_a_path_on_which_something_else_stands_is_left_alone(folder: Path):
    (folder / "relay.sock").write_text("important")
    code, said = refused(f"unix://{folder}/relay.sock")
    assert (code, (folder / "relay.sock").read_text()) == (1, "important")
    assert "something that is no socket is there already. Name another path." in said


def test_a_path_that_is_too_long_is_refused_before_anything_else():
    code, said = refused(f"unix:///{'x' * 107}")
    assert code == 2
    assert "108 bytes" in said
    assert "107" in said


def test_a_folder_that_others_may_write_is_refused(folder: Path):
    folder.chmod(0o777)
    code, said = refused(f"unix://{folder}/relay.sock")
    assert code == 1
    assert "others may write its folder" in said
    assert "chmod go-w" in said


def test_a_port_beyond_loopback_is_not_opened_to_everyone():
    listen = f"0.0.0.0:{free_port()}"
    code, said = refused(listen)
    assert code == 1
    assert f"--listen {listen} is reachable from other machines" in said
    assert "--tokens-file" in said
    assert "--insecure" in said


def test_tokens_are_not_for_a_socket(folder: Path):
    (folder / "tokens.toml").write_text("")
    code, said = refused(f"unix://{folder}/relay.sock", f"--tokens-file={folder / 'tokens.toml'}")
    assert code == 2
    assert "guarded by its file's permissions" in said


def test_a_socket_is_its_living_relays_and_a_dead_ones_is_taken_over(coordinator: Coordinator, folder: Path):
    path = folder / "relay.sock"
    with Relay(folder, coordinator.endpoint, listen=f"unix://{path}") as relay:
        code, said = refused(relay.listen)
        assert code == 1
        assert "somebody listens there already. Stop that relay, or name another path." in said
        with ranks(relay.listen, 2) as job:
            assert [one.outcome for one in everyone(job)] == ["RELEASED"] * 2
        assert path.stat().st_mode & 0o777 == 0o600
        relay.kill()
        assert path.is_socket()
        relay.start()
        with ranks(relay.listen, 2, run_id="next") as job:
            assert [one.outcome for one in everyone(job)] == ["RELEASED"] * 2
        assert relay.stop() == 0
        assert not path.exists()


# ---------------------------------------------------------------------- garbage

HTTP_2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def garbage(seed: int) -> list[bytes]:
    chance = random.Random(seed)
    return [
        b"",
        b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
        HTTP_2,
        HTTP_2 + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00" + chance.randbytes(100),
        HTTP_2 + chance.randbytes(10_000),
        b"\x16\x03\x01" + chance.randbytes(500),
        *(chance.randbytes(chance.choice((1, 100, 100_000))) for _ in range(10)),
    ]


@pytest.mark.parametrize("kind", ["socket", "port"])
def test_garbage_on_a_relays_socket_disturbs_nobody(coordinator: Coordinator, tmp_path: Path, kind: str):
    listen = f"127.0.0.1:{free_port()}" if kind == "port" else ""
    with Relay(tmp_path, coordinator.endpoint, listen=listen) as relay, ranks(relay.listen, 2) as job:
        everyone(job)
        job[0].tell("barrier")
        for data in garbage(13):
            with socket.socket(socket.AF_INET if listen else socket.AF_UNIX) as peer:
                where: Any = ("127.0.0.1", int(listen.rpartition(":")[2])) if listen else relay.listen[7:]
                peer.connect(where)
                try:
                    peer.sendall(data)
                except OSError:
                    continue  # It was thrown out before it had said all.
        assert [job[1].ask("barrier").outcome, job[0].answer().outcome] == ["RELEASED"] * 2
        assert [one.ask("logged") for one in job] == [[], []]
        everyone(job, "goodbye")
        assert_well(relay)


def test_bad_messages_end_no_other_ranks_stream(tmp_path: Path, thorough: bool):
    """Many streams of the same runs share the relay's lines; all that was said is forgotten afterwards."""
    messages = 30_000 if thorough else 2_000
    with (
        Coordinator(tmp_path, session_ttl=3.0, extra=BOUNDS) as coordinator,
        Relay(tmp_path, coordinator.endpoint, listen=f"127.0.0.1:{free_port()}") as relay,
        ranks(relay.listen, 2, run_id="good") as job,
    ):
        everyone(job)
        command = [sys.executable, "-m", "tests.support.hostile.fuzzer", relay.listen, "20", str(messages)]
        fuzzer = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=2 * PATIENCE, check=True)
        report = json.loads(fuzzer.stdout.splitlines()[-1])
        assert not report["wrong"], next(iter(report["wrong"].items()))
        assert report["answers"][SESSION].keys() >= GOOD
        assert [one.outcome for one in everyone(job)] == ["RELEASED"] * 2
        assert [one.ask("logged") for one in job] == [[], []]
        everyone(job, "goodbye")
        assert_well(relay)
        assert "Traceback" not in coordinator.log_path.read_text()


def test_a_message_beyond_what_a_rank_may_say_ends_its_stream_alone(coordinator: Coordinator, tmp_path: Path):
    with Relay(tmp_path, coordinator.endpoint) as relay, ranks(relay.listen, 2) as job:
        everyone(job)
        stream = Stream(relay.listen)
        stream.say(hello()).hear()
        stream.say(arrive(payload=b"x" * 5_000_000))
        assert stream.refusal()[0] == "LIMIT_EXCEEDED"
        assert stream.end() == (grpc.StatusCode.RESOURCE_EXHAUSTED, "LIMIT_EXCEEDED")
        stream.close()
        assert [one.outcome for one in everyone(job)] == ["RELEASED"] * 2
        assert [one.ask("logged") for one in job] == [[], []]


# ---------------------------------------------------------------------- another worker's rank


@pytest.mark.parametrize("where", ["the same relay", "another relay", "no relay"])
def test_a_second_process_of_a_rank_supersedes_the_first_as_directly(
    coordinator: Coordinator, tmp_path: Path, where: str
):
    with Relay(tmp_path, coordinator.endpoint) as relay, Relay(tmp_path, coordinator.endpoint) as other:
        theirs = {"the same relay": relay.listen, "another relay": other.listen}.get(where)
        with ranks(relay.listen, 3) as (zero, one, two):
            everyone([zero, one, two])
            one.tell("barrier")
            claimant = Rank(Identity(theirs or coordinator.endpoint, 1, 3))
            try:
                claimant.tell("barrier")
                lost = one.answer()
                assert (lost.outcome, lost.reason) == ("RefusedError", "SUPERSEDED")
                assert f"pid {claimant.pid}" in lost.message
                assert [rank.outcome for rank in everyone([zero, two])] == ["RELEASED"] * 2
                assert claimant.answer().outcome == "RELEASED"
            finally:
                claimant.end()


def test_message_about_another_workers_rank_is_refused(coordinator: Coordinator, tmp_path: Path):
    """Both streams share a line, on which the coordinator would take it."""
    with Relay(tmp_path, coordinator.endpoint) as relay:
        victim, thief = Stream(relay.listen), Stream(relay.listen)
        thief.run_id = victim.run_id
        victim.say(hello(rank=1)).hear()
        victim.say(join()).hear()
        thief.say(hello(rank=0)).hear()
        thief.say(join()).hear()
        assert thief.say(arrive(rank=1)).refusal()[0] == "RANK_NOT_IN_SESSION"
        assert thief.say(join(ranks=[1])).refusal()[0] == "RANK_NOT_IN_SESSION"
        thief.say(arrive(rank=0, timeout_ms=60_000))
        victim.say(arrive(rank=1, timeout_ms=60_000))
        assert victim.hear().decision.sequence == thief.hear().decision.sequence == 0
        thief.say(pb.ConnectRequest(remove_processes=pb.RemoveProcesses(ranks=[1])))
        assert thief.end() == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT")
        victim.say(arrive(rank=1, sequence=1, timeout_ms=100))
        assert victim.decision().sequence == 1
        for stream in (victim, thief):
            stream.close()
        assert_well(relay)


# ---------------------------------------------------------------------- tokens

OF_RELAY = "of-the-relay-0123456789"
OF_WORKER = "of-a-worker-0123456789"
OF_VIEWER = "of-a-viewer-0123456789"


def tokens(path: Path, **given: tuple[str, str, str]) -> Path:
    """A tokens file: by name, the role, the runs and the token."""
    path.write_text(
        "\n".join(
            f'[[token]]\nname = "{name}"\nrole = "{role}"\nruns = ["{runs}"]\ntoken = "{token}"\n'
            for name, (role, runs, token) in given.items()
        )
    )
    return path


def answer(endpoint: str, method: str, run_id: str, token: str = "") -> str:
    """The reason why a call with a token is refused, or what it is answered with."""
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    with grpc.insecure_channel(endpoint, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        try:
            if method == "Connect":
                connect: Any = channel.stream_stream(
                    "/muster.v1.SessionService/Connect",
                    request_serializer=pb.ConnectRequest.SerializeToString,
                    response_deserializer=pb.ConnectResponse.FromString,
                )
                call = connect(iter([hello(run_id=run_id)]), metadata=metadata, timeout=PATIENCE)
                first: pb.ConnectResponse = next(call)
                if first.HasField("refusal"):
                    next(call)
                call.cancel()
                return str(first.WhichOneof("message"))
            # Field 1 of all these requests is the run.
            request = b"\x0a" + bytes([len(run_id)]) + run_id.encode()
            call = channel.unary_unary(f"/muster.v1.{method}")
            call(request, metadata=metadata, timeout=PATIENCE)
        except grpc.RpcError as error:
            return reason_of(error) if rpc_status.from_call(error) else error.code().name
    return "OK"


def status(endpoint: str, token: str) -> coordinator_pb2.StatusResponse:
    with grpc.insecure_channel(endpoint, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        return coordinator_pb2_grpc.CoordinatorServiceStub(channel).Status(
            coordinator_pb2.StatusRequest(),
            metadata=(("authorization", f"Bearer {token}"),),
            timeout=PATIENCE,
        )


def test_a_port_asks_for_tokens_and_the_relay_shows_its_own(tmp_path: Path):
    known = tokens(tmp_path / "coordinator.toml", relay=("worker", "a-1", OF_RELAY))
    asked = tokens(
        tmp_path / "relay.toml",
        worker=("worker", "a-*", OF_WORKER),
        viewer=("viewer", "a-*", OF_VIEWER),
    )
    environment = {**os.environ, "MUSTER_TOKEN": OF_RELAY}
    with (
        Coordinator(tmp_path, extra=(f"--tokens-file={known}",)) as coordinator,
        Relay(
            tmp_path,
            coordinator.endpoint,
            listen=f"127.0.0.1:{free_port()}",
            extra=(f"--tokens-file={asked}",),
            environment=environment,
        ) as relay,
    ):
        answers = {
            (method, run_id, token): answer(relay.listen, method, run_id, token)
            for method in ("Connect", "StoreService/NumKeys")
            for run_id in ("a-1", "a-2", "b-1")
            for token in ("", "unknown-0123456789", OF_VIEWER, OF_WORKER)
        }
        for (method, run_id, token), found in answers.items():
            if token == OF_WORKER:
                welcome = "welcome" if method == "Connect" else "OK"
                expected = welcome if run_id == "a-1" else "RUN_NOT_ALLOWED"
                # What is the worker's and not the relay's, it may do with its own token, without the relay.
                if (method, run_id) == ("Connect", "a-2"):
                    expected = "RELAY_CUT_OFF"
            else:
                expected = {"": "TOKEN_MISSING", OF_VIEWER: "ROLE_TOO_LOW"}.get(token, "TOKEN_UNKNOWN")
            assert found == expected, (method, run_id, token)
        # What shows several runs would show those that the relay's own token may see.
        assert answer(relay.listen, "RunService/Members", "a-1", OF_WORKER) == "OK"
        assert answer(relay.listen, "BarrierService/List", "a-1", OF_WORKER) == "ROLE_TOO_LOW"
        assert answer(coordinator.endpoint, "StoreService/NumKeys", "a-1", OF_WORKER) == "TOKEN_UNKNOWN"
        through, direct = status(relay.listen, OF_WORKER), status(coordinator.endpoint, OF_RELAY)
        assert through.caller == direct.caller
        assert (through.relay, direct.relay) == (f"{socket.gethostname()}:{relay.pid}", "")
        assert_well(relay)
        for log in (relay.log_path.read_text(), coordinator.log_path.read_text()):
            assert not any(token in log for token in (OF_RELAY, OF_WORKER, OF_VIEWER))


class Recorder(grpc.GenericRpcHandler):
    """Stands for the coordinator, and writes down all headers."""

    def __init__(self) -> None:
        self.headers: list[dict[str, str | bytes]] = []

    def service(self, details: grpc.HandlerCallDetails) -> None:
        self.headers.append(dict(details.invocation_metadata))


def test_a_workers_token_is_never_sent_up(tmp_path: Path):
    recorder = Recorder()
    asked = tokens(tmp_path / "relay.toml", worker=("worker", "*", OF_WORKER))
    with (
        serving(handlers=[recorder]) as upstream,
        Relay(
            tmp_path,
            upstream,
            listen=f"127.0.0.1:{free_port()}",
            extra=(f"--tokens-file={asked}",),
            environment={**os.environ, "MUSTER_TOKEN": OF_RELAY},
        ) as relay,
    ):
        answer(relay.listen, "Connect", "a-1", OF_WORKER)
        answer(relay.listen, "StoreService/NumKeys", "a-1", OF_WORKER)
    assert len(recorder.headers) >= 2
    assert {headers["authorization"] for headers in recorder.headers} == {f"Bearer {OF_RELAY}"}
    assert OF_WORKER not in str(recorder.headers)

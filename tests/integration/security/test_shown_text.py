"""Tags and escape codes from callers are shown and not obeyed."""

from pathlib import Path

import grpc
import pytest
from typer.testing import CliRunner

from lab.patience import PATIENCE
from lab.processes.coordinator import Coordinator
from muster.service.cli.main import app
from muster.v1 import (
    barrier_pb2,
    barrier_pb2_grpc,
)
from tests.support.expect import some
from tests.support.rich_status import reason_of

TAG = "<script>alert(1)</script>"
ESCAPES = "\x1b[2J\x1b]0;owned\x07\u202e\x9b31m\r"


def test_tags_and_escape_codes_are_shown_and_not_obeyed(tmp_path: Path):
    with Coordinator(tmp_path) as coordinator:
        with grpc.insecure_channel(coordinator.endpoint) as connection:
            request = barrier_pb2.ArriveRequest(
                run_id=TAG,
                prefix=TAG,
                host=TAG,
                world_size=2,
                timeout_ms=60_000,
                failure=f"{TAG}{ESCAPES}\nforged line",
            )
            stub = barrier_pb2_grpc.BarrierServiceStub(connection)
            stub.Arrive(request, timeout=PATIENCE)
            for field in ("run_id", "prefix", "host"):
                bad = barrier_pb2.ArriveRequest()
                bad.CopyFrom(request)
                setattr(bad, field, ESCAPES)
                with pytest.raises(grpc.RpcError) as caught:
                    stub.Arrive(bad, timeout=PATIENCE)
                assert reason_of(caught.value) == "INVALID_ARGUMENT"
                assert_harmless(some(caught.value.details()))
        said = [
            muster_command(coordinator.endpoint, *arguments)
            for arguments in (
                ("get", "runs"),
                ("get", "barriers", "-o", "wide"),
                ("get", "barriers", "-o", "json"),
                ("get", "members", TAG, "-o", "wide"),
                ("get", "runs", ESCAPES),
                ("describe", "run", TAG),
                ("describe", "barrier", TAG, TAG),
                ("describe", "member", TAG, "0"),
                ("abort", TAG, TAG, "--reason", ESCAPES),
                ("close", TAG, "--reason", f"{TAG}{ESCAPES}"),
                ("close", TAG),
            )
        ]
        for text in said:
            assert_harmless(text)
        assert any(TAG in text for text in said)
        # ESC stands there as four characters.
        assert "\\x1b[2J" in said[6]
        coordinator.stop()
        log = coordinator.log_path.read_text()
        assert_harmless(log)
        (decided,) = coordinator.log("barrier.decided")
        assert TAG in decided["reason"]
        assert "\\x1b[2J" in decided["reason"]


def muster_command(endpoint: str, *arguments: str) -> str:
    done = CliRunner().invoke(app, [*arguments, *(() if arguments[0] == "serve" else ("-e", endpoint))])
    return done.stdout + done.stderr


def assert_harmless(text: str) -> None:
    assert all(char.isprintable() or char == "\n" for char in text), ascii(text)

"""The ``muster`` command among several replicas."""

import json
import signal
import subprocess
import time
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

from lab.patience import PATIENCE
from lab.processes.coordinator import MUSTER, Coordinator
from muster.service.cli.failure import Exit
from muster.service.cli.main import app
from muster.worker import GrpcBarrier
from tests.support.grpc_server import serving
from tests.support.rendezvous_runs import in_thread
from tests.support.replica_clients import (
    Succession,
    a_barrier,
)
from tests.support.standby import Address, Standby

pytestmark = pytest.mark.usefixtures("no_known_addresses")


def command(*arguments: str) -> tuple[int, str]:
    answer = CliRunner().invoke(app, list(arguments))
    return answer.exit_code, answer.output


def test_a_command_says_that_nobody_leads_when_its_time_is_over():
    with Standby(hold=0.3) as standby, Standby(hold=0.3) as other, Address() as dead:
        endpoint = ",".join(one.endpoint for one in (standby, dead, other))
        began = time.monotonic()
        code, said = command("get", "runs", "--endpoint", endpoint, "--timeout", "3")
        assert time.monotonic() - began >= 2.5
    assert code == Exit.UNREACHABLE
    assert f"Error: no coordinator of {endpoint} leads" in said
    assert f"{standby.endpoint}: this replica stands by" in said
    assert f"{other.endpoint}: this replica stands by" in said
    assert f"{dead.endpoint}: failed to connect" in said
    assert "next:" in said


def test_a_command_says_at_once_that_nobody_can_be_reached():
    with Address() as one, Address() as two:
        code, said = command(
            "get", "runs", "--endpoint", f"{one.endpoint},{two.endpoint}", "--timeout", "3600"
        )
    assert code == Exit.UNREACHABLE
    assert f"Error: no coordinator of {one.endpoint},{two.endpoint} can be reached" in said
    assert f"{one.endpoint}: failed to connect" in said
    assert f"{two.endpoint}: failed to connect" in said


def test_a_command_waits_for_the_next_leader(coordinator: Coordinator):
    with Standby() as standby:
        answer = in_thread(
            lambda: command("get", "runs", "--endpoint", standby.endpoint, "--timeout", str(PATIENCE))
        )
        standby.holds()
        standby.follow(coordinator.endpoint)
        code, said = answer.result(PATIENCE)
    assert (code, coordinator.endpoint in said or "no runs" in said) == (Exit.DONE, True)


def test_command_asks_no_other_replica_when_the_leader_refuses(coordinator: Coordinator):
    with Standby() as standby:
        endpoint = f"{coordinator.endpoint},{standby.endpoint}"
        code, said = command("describe", "run", "none", "--endpoint", endpoint)
        assert (code, standby.asked) == (Exit.FAILED, [])
    assert "none" in said


def test_a_bad_part_of_an_endpoint_is_named():
    code, said = command("get", "runs", "--endpoint", "a:1,b")
    assert code == Exit.USAGE
    assert '"b" is not HOST:PORT' in said


def test_a_watch_goes_on_at_the_next_leader(succession: Succession):
    a_barrier(succession.endpoint)
    with subprocess.Popen(
        [MUSTER, "get", "runs", "--watch", "--output=json", f"--endpoint={succession.endpoint}"],
        stdout=subprocess.PIPE,
        text=True,
    ) as watch:
        assert watch.stdout is not None
        try:
            assert json.loads(watch.stdout.readline())["run_id"] == "run"
            succession.happens()
            GrpcBarrier(0, 1, "p", succession.endpoint, PATIENCE, PATIENCE, run_id="later", generation=0)
            for line in watch.stdout:
                if json.loads(line)["run_id"] == "later":
                    break
            else:
                raise AssertionError("the watch has ended")
        finally:
            watch.send_signal(signal.SIGINT)


class Breaking(grpc.GenericRpcHandler):
    """Takes every call, and loses it."""

    def service(self, handler_call_details: Any) -> Any:
        def lose(_: bytes, context: grpc.ServicerContext) -> bytes:
            context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

        return grpc.unary_unary_rpc_method_handler(lose)


def test_command_repeats_no_change_that_may_have_been_made(coordinator: Coordinator):
    """An abort that was lost on its way back would end the next barrier, too; a look may be taken again."""
    a_barrier(coordinator.endpoint)
    with serving(handlers=[Breaking()]) as endpoint:
        where = f"--endpoint={endpoint},{coordinator.endpoint}"
        code, said = command("abort", "run", "p", where)
        assert code == Exit.UNREACHABLE
        assert "Socket closed" in said
        assert "whether the barrier was aborted is unknown; see: muster describe barrier run p" in said
        assert command("describe", "barrier", "run", "p", where)[0] == Exit.DONE

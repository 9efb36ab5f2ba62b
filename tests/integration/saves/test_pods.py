"""A job as pods run it: TLS, service accounts, checkpoints in a bucket; a rank killed in the middle."""

import os
import signal
import time
from pathlib import Path

import pytest

from lab.authority import Authority
from lab.processes.agents import Job
from lab.processes.bucket_server import BUCKET, BucketServer
from lab.processes.coordinator import Coordinator
from tests.integration.security.test_identity import ISSUER, put, tokens_toml
from tests.support.chaos.save_chaos import Wire
from tests.support.saves.save_history import whole_checkpoint

SHORT, LONG = 20.0, 3600.0
"""Seconds of tokens. A short one is enough for a session to open, and not for a job to start."""


def test_job_of_pods_survives_a_rank_and_a_rotated_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, thorough: bool
):
    authority = Authority(tmp_path)
    pair = authority.issue("server")
    keys, tokens, mine = tmp_path / "keys.json", tmp_path / "tokens.toml", tmp_path / "token"
    ISSUER.publish(keys)
    tokens.write_text(tokens_toml(f'keys_file = "{keys}"'))
    put(mine, ISSUER.token(seconds=LONG))
    place = f"s3://{BUCKET}/team-a"
    command = ("--module", "tests.support.chaos.chaos_rank", str(tmp_path), place, "checkpointer", "cpu", "1")
    extra = (f"--tokens-file={tokens}", f"--tls-cert={pair.cert}", f"--tls-key={pair.key}")
    with BucketServer(tmp_path) as server:
        given = server.environ() | {"MUSTER_TLS_CA": str(authority.ca), "MUSTER_TOKEN_FILE": str(mine)}
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        with (
            Coordinator(tmp_path, session_ttl=5.0, extra=extra) as coordinator,
            Wire(tmp_path / "events") as wire,
            Job(tmp_path, coordinator.endpoint, "team-a-1", command=command, ranks=2) as job,
        ):
            agent = job.agent("1", join_timeout=60, keep_alive_interval=1)
            events = wire.events()
            next(event for event in events if event.what == "latest")
            # All come again, with a token that soon ends, and go on with the one that is there by then.
            coordinator.kill()
            put(mine, ISSUER.token(seconds=SHORT))
            ends = time.time() + SHORT
            decided = len(coordinator.log("barrier.decided"))
            coordinator.start().logged("barrier.decided", decided + 1)
            put(mine, ISSUER.token(seconds=LONG))
            assert {line["check"] for line in coordinator.logged("token.ended")} == {"exp"}
            assert time.time() >= ends - 1
            next(event for event in events if event.what == "latest")
            if thorough:
                put(mine, ISSUER.token(seconds=3 * SHORT))  # For all who come now, and nobody rotates it.
            os.kill(job.workers()[-1].pid, signal.SIGKILL)
            resumed = next(event for event in events if event.what == "loaded" and event.path)
            assert resumed.round > 0
            assert whole_checkpoint(resumed.path, resumed.step, server.options()) is None
            next(event for event in events if event.what == "latest" and event.step > resumed.step)
            if thorough:
                assert agent.wait() != 0
                assert "it was not rotated" in job.said()
            else:
                job.finish()
                assert agent.wait() == 0, job.said()

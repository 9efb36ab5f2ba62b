"""``muster checkpoint`` as a process, over what a real Checkpointer and an adapter have written."""

import json
import os
import pty
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from lab.patience import PATIENCE
from lab.processes import fork_client
from lab.processes.bucket_server import BUCKET, BucketServer
from lab.processes.coordinator import MUSTER
from muster.checkpoint.damage import CorruptCheckpointError
from muster.checkpoint.storage_options import STORAGE_OPTIONS
from muster.worker import Checkpointer
from muster.worker.integrations.checkpoint import CommittedWriter
from tests.support.saves.damage import flip
from tests.support.saves.fake_barrier import FakeBarrier

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def muster(*arguments: Any, env: dict[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
    command = [str(MUSTER), "checkpoint", *map(str, arguments)]
    return fork_client.run(command, env={**os.environ, **(env or {})}, timeout=PATIENCE)


def document(*arguments: Any, code: int = 0, env: dict[str, str] | None = None) -> list[dict[str, Any]]:
    done = muster(*arguments, "-o", "json", env=env)
    assert done.returncode == code, (done.stdout, done.stderr)
    found: list[dict[str, Any]] = json.loads(done.stdout)["checkpoints"]
    return found


def state(step: int) -> dict[str, Any]:
    return {"model": {"weight": torch.full((1000,), float(step)), "bias": torch.zeros(3)}, "step": step}


def saved(place: str | Path, *steps: int, **options: Any) -> Checkpointer:
    barrier: Any = FakeBarrier()
    made = Checkpointer(place, barrier=barrier, **options)
    for step in steps:
        made.save(step, state(step))
    assert made.finalize(blocking=True) == list(steps)
    return made


def test_checkpoints_of_a_job_are_listed_verified_and_marked(tmp_path: Path):
    made = saved(tmp_path, 100, 200, 300)
    assert [(one["step"], one["state"], one["digests"]) for one in document("list", tmp_path)] == [
        (300, "COMMITTED", True),
        (200, "COMMITTED", True),
        (100, "COMMITTED", True),
    ]
    assert {one["state"] for one in document("verify", tmp_path)} == {"VERIFIED"}
    flip(tmp_path / "step-0000000200" / "__0_0.distcp", 3000)
    newest, damaged, oldest = document("verify", tmp_path, "--threads=2", code=6)
    assert [newest["state"], oldest["state"]] == ["VERIFIED", "VERIFIED"]
    (damage,) = damaged["damages"]
    assert (damaged["step"], damage["file"], damage["written_by_rank"]) == (200, "__0_0.distcp", 0)
    assert 0 < damage["offset"] <= 3000
    # What people mark, the next load passes over.
    assert muster("mark", tmp_path, "--corrupt=300", "--reason=the loss was nan").returncode == 0
    assert muster("mark", tmp_path, "--corrupt=200").returncode == 0
    into = state(-1)
    assert made.load(into).step == into["step"] == 100
    assert muster("mark", tmp_path, "--clear=300").returncode == 0
    assert made.load(into).step == into["step"] == 300
    with pytest.raises(CorruptCheckpointError):
        made.load(into, tmp_path / "step-0000000200")
    # What people keep, retention leaves.
    assert muster("mark", tmp_path, "--keep=100").returncode == 0
    made.close()
    saved(tmp_path, 400, keep_last=1).close()
    assert [(one["step"], one["kept"]) for one in document("list", tmp_path)] == [(400, False), (100, True)]


def test_checkpoint_of_an_adapter_is_listed(tmp_path: Path):
    barrier: Any = FakeBarrier()
    dcp.save(state(5), storage_writer=CommittedWriter(tmp_path / "checkpoint-5", barrier=barrier))
    (one,) = document("list", tmp_path)
    assert (one["step"], one["name"], one["state"], one["run_id"]) == (5, "checkpoint-5", "COMMITTED", "job")
    (alone,) = document("list", tmp_path / "checkpoint-5")
    assert alone["path"] == one["path"]
    (found,) = document("verify", tmp_path)
    assert found["state"] == ("VERIFIED" if one["digests"] else "UNVERIFIED")


def test_progress_is_on_the_terminal_and_data_on_stdout(tmp_path: Path):
    saved(tmp_path, 100).close()
    side, theirs = pty.openpty()
    process = fork_client.popen(
        [str(MUSTER), "checkpoint", "verify", str(tmp_path)],
        env={**os.environ, "TERM": "xterm", "COLUMNS": "", "LINES": ""},
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
    )
    os.close(theirs)
    with process:
        data, _ = process.communicate(timeout=PATIENCE)
    drawn = b""
    try:
        while more := os.read(side, 4096):
            drawn += more
    except OSError:  # The other side is closed.
        pass
    finally:
        os.close(side)
    assert process.returncode == 0
    assert [line.split()[:2] for line in data.splitlines()] == [["STEP", "STATE"], ["100", "VERIFIED"]]
    assert b"step 100" in drawn
    assert b"VERIFIED" not in drawn


# ---------------------------------------------------------------------- buckets


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BucketServer]:
    with BucketServer(tmp_path_factory.mktemp("server")) as running:
        yield running


def test_checkpoints_in_a_bucket_are_listed_verified_and_marked(server: BucketServer, tmp_path: Path):
    job, env = f"s3://{BUCKET}/{tmp_path.name}", server.environ()
    made = saved(job, 100, 200, storage_options=server.options())
    assert [(one["step"], one["state"], one["digests"]) for one in document("list", job, env=env)] == [
        (200, "COMMITTED", True),
        (100, "COMMITTED", True),
    ]
    assert {one["state"] for one in document("verify", job, env=env)} == {"VERIFIED"}
    newest = document("list", job, env=env)[0]["path"]
    shard = f"{newest.removeprefix('s3://')}/__0_0.distcp"
    filesystem = server.filesystem()
    data = bytearray(filesystem.cat_file(shard))
    data[3000] ^= 1
    filesystem.pipe_file(shard, bytes(data))
    (found,) = document("verify", newest, env=env, code=6)
    (damage,) = found["damages"]
    assert (damage["file"], damage["written_by_rank"]) == ("__0_0.distcp", 0)
    filesystem.pipe_file(shard, bytes(data) + b"x")
    document("verify", job, "--step=200", env=env, code=6)
    assert muster("mark", job, "--corrupt=200", env=env).returncode == 0
    into = state(-1)
    assert made.load(into).step == into["step"] == 100
    made.close()


def test_store_is_reached_by_the_options_of_the_environment(server: BucketServer, tmp_path: Path):
    """Nothing else names its endpoint and the credentials."""
    job = f"s3://{BUCKET}/{tmp_path.name}"
    saved(job, 100, storage_options=server.options()).close()
    env = {STORAGE_OPTIONS: json.dumps(server.options())}
    (one,) = document("list", job, env=env)
    assert one["step"] == 100
    (found,) = document("verify", one["path"], env=env)
    assert found["state"] == "VERIFIED"
    assert muster("describe", job, env=env).stdout.startswith("Step:")
    assert muster("mark", job, "--corrupt=100", env=env).returncode == 0
    assert document("list", job, env=env)[0]["state"] == "DAMAGED"


def test_bucket_that_refuses_is_an_error(server: BucketServer, tmp_path: Path):
    job = f"s3://{BUCKET}/{tmp_path.name}"
    saved(job, 100, storage_options=server.options()).close()
    refused = muster("list", job, env=server.environ("EXPIRED-1"))
    assert refused.returncode == 1
    assert refused.stderr.startswith(f"Error: {job} cannot be read: ")
    assert "expired" in refused.stderr
    assert document("list", job, env=server.environ("READER-1"))[0]["step"] == 100
    refused = muster("mark", job, "--keep=100", env=server.environ("READER-1"))
    assert refused.returncode == 1
    assert "cannot be marked" in refused.stderr

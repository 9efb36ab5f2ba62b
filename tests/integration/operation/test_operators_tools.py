"""What an operator does beside looking: retention, configuration, doctor, backup; with a real coordinator."""

import json
import os
import re
import subprocess
from pathlib import Path

from lab.patience import PATIENCE, until
from lab.processes.command import job, muster, output, watching
from lab.processes.coordinator import MUSTER, Coordinator
from muster.service.storage.sqlite import SqliteEngine

# ---------------------------------------------------------------------- retention


def test_a_closed_run_is_forgotten_by_list_watch_metrics_log_and_disk(tmp_path: Path):
    file = tmp_path / "muster.toml"
    file.write_text("keep_closed_runs = 0.3")
    with Coordinator(tmp_path, session_ttl=1.0, extra=(f"--config={file}",)) as coordinator:
        with watching(coordinator.endpoint, "get", "runs", "--watch") as process:
            with job(coordinator):
                output(coordinator.endpoint, "close", "job1")
                assert 'run="job1"' in coordinator.get("/metrics")[1]
            while (row := process.stdout.readline().split()[:2]) != ["job1", "FORGOTTEN"]:
                assert row in (["RUN", "STATE"], ["job1", "OPEN"], ["job1", "CLOSED"]), process.stderr.read()
        until(lambda: 'run="job1"' not in coordinator.get("/metrics")[1])
        assert json.loads(muster(coordinator.endpoint, "get", "runs", "-o", "json").stdout) == {"runs": []}
        (line,) = coordinator.logged("run.forgotten")
        assert line["reason"] == "run job1 was forgotten: closed, and nobody has used it for 300 ms"
        coordinator.stop()
        engine = SqliteEngine(tmp_path / "muster.db")
        engine.open()
        assert list(engine.scan()) == []
        engine.close()
        coordinator.start()
        with job(coordinator):
            (run,) = json.loads(output(coordinator.endpoint, "get", "runs", "-o", "json"))["runs"]
            assert (run["decided_barriers"], run.get("closed")) == ("1", None), "the id is free again"


# ---------------------------------------------------------------------- doctor


def test_the_doctor_finds_a_coordinator_well_and_one_that_is_gone(coordinator: Coordinator):
    with job(coordinator):
        lines = output(coordinator.endpoint, "doctor").splitlines()
    names = ["resolve", "connect", "tls", "authorisation", "version", "storage", "clock"]
    assert [line.split()[:2] for line in lines] == [["ok", name] for name in names]
    assert "a commit takes" in lines[5]
    found = json.loads(output(coordinator.endpoint, "doctor", "-o", "json"))
    assert [(one["name"], one["result"], one["next"]) for one in found["checks"]] == [
        (name, "ok", "") for name in names
    ]
    coordinator.kill()
    gone = muster(coordinator.endpoint, "doctor")
    assert gone.returncode == 3
    assert gone.stdout.splitlines()[1].split()[:2] == ["failed", "connect"]
    assert "next: check that muster serve runs there" in gone.stdout


def test_the_doctor_knows_the_storage_of_a_coordinator_that_has_just_begun(coordinator: Coordinator):
    (line,) = (line for line in output(coordinator.endpoint, "doctor").splitlines() if "storage" in line)
    assert re.search(r"a commit takes [\d.]+ ms \(median of the last 1;", line), line


# ---------------------------------------------------------------------- backup and restore


def test_a_backup_of_a_running_coordinator_comes_back_in_its_place(coordinator: Coordinator, tmp_path: Path):
    file, state = str(tmp_path / "backup.db"), f"--state={coordinator.state}"
    with job(coordinator):
        done = output(coordinator.endpoint, "backup", file, state)
        assert done.startswith(f"{tmp_path / 'muster.db'} was backed up to {file}: 1 run, ")
        output(coordinator.endpoint, "close", "job1")
        refused = muster(coordinator.endpoint, "restore", file, state, "--force")
        assert refused.returncode == 1
        assert "is in use by another coordinator" in refused.stderr
    coordinator.stop()
    refused = muster(coordinator.endpoint, "restore", file, state)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "Give --force to replace it" in refused.stderr
    (serving,) = coordinator.logged("serving")
    before = serving["epoch"]
    output(coordinator.endpoint, "restore", file, state, "--force")
    coordinator.start()
    assert coordinator.logged("serving", 2)[-1]["epoch"] > before + 1
    (run,) = json.loads(output(coordinator.endpoint, "get", "runs", "-o", "json"))["runs"]
    assert (run["run_id"], run["decided_barriers"]) == ("job1", "1")
    assert "closed" not in run, "it was closed after the backup"


# ---------------------------------------------------------------------- completion


def test_a_shell_can_complete_commands(tmp_path: Path):
    completing = {"_MUSTER_COMPLETE": "complete_bash", "COMP_WORDS": "muster do", "COMP_CWORD": "1"}
    done = subprocess.run(
        [str(MUSTER)], env={**os.environ, **completing}, capture_output=True, text=True, timeout=PATIENCE
    )
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["doctor"], "")
    # It looks which shell it was called by.
    command = ["bash", "-c", f"{MUSTER} --show-completion bash; exit $?"]
    script = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert (script.returncode, script.stderr) == (0, "")
    assert "complete -o default -F _muster_completion muster" in script.stdout


# ---------------------------------------------------------------------- the log


def test_a_coordinator_that_cannot_start_says_so_in_json_if_that_is_its_log(coordinator: Coordinator):
    for arguments, sign in (
        ([f"--state={coordinator.state}"], "in use by another coordinator"),
        (["--state=memory:", f"--listen={coordinator.endpoint}"], "cannot listen on"),
    ):
        done = muster(coordinator.endpoint, "serve", "--log-format=json", "--http=127.0.0.1:0", *arguments)
        assert done.returncode == 1
        *_, last = [json.loads(line) for line in done.stderr.splitlines()]
        assert (last["event"], last["level"]) == ("failed", "critical")
        assert sign in last["reason"]

"""What an operator does beside looking: retention, configuration, doctor, backup; with a real coordinator."""

import json
from pathlib import Path

from muster.service.storage.sqlite import SqliteEngine
from tests.support.command import job, muster, output, until, watching
from tests.support.coordinator import Coordinator

# ---------------------------------------------------------------------- retention


def test_a_closed_run_is_forgotten_by_list_watch_metrics_log_and_disk(tmp_path: Path):
    file = tmp_path / "muster.toml"
    file.write_text("keep_closed_runs = 0.3")
    with Coordinator(tmp_path, session_ttl=1.0, extra=(f"--config={file}",)) as coordinator:
        with watching(coordinator.endpoint, "get", "runs", "--watch") as process:
            with job(coordinator):
                output(coordinator.endpoint, "close", "job1")
                assert 'run="job1"' in coordinator.get("/metrics")[1]
            while (line := process.stdout.readline().split()[:2]) != ["job1", "FORGOTTEN"]:
                assert line in (["RUN", "STATE"], ["job1", "OPEN"], ["job1", "CLOSED"]), process.stderr.read()
        until(lambda: 'run="job1"' not in coordinator.get("/metrics")[1])
        assert json.loads(muster(coordinator.endpoint, "get", "runs", "-o", "json").stdout) == {"runs": []}
        (line,) = coordinator.log("run.forgotten")
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

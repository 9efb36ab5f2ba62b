"""What the kernel says of this process and its children."""

import os
import signal
import subprocess
from pathlib import Path

from muster.worker.insight.process import child_state, cpu_seconds, resident_bytes

MIB = 2**20


def test_used_memory_is_resident():
    before = resident_bytes()
    used = b"x" * (128 * MIB)
    assert resident_bytes() - before > 64 * MIB
    assert len(used) == 128 * MIB


def test_work_uses_processor_time():
    before = cpu_seconds()
    while cpu_seconds() - before < 0.02:
        pass


def test_child_state_tells_stopped_and_ended_children_apart(tmp_path: Path):
    """Its name may be anything, also what looks like the rest of the line."""
    program = tmp_path / "a) R (b"
    program.write_text("#!/bin/sh\nread line\n")
    program.chmod(0o755)
    with subprocess.Popen([program], stdin=subprocess.PIPE) as child:
        try:
            child.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, child.pid, os.WSTOPPED)
            assert child_state(child.pid) == "T"
        finally:
            child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert child_state(child.pid) == "Z"


def test_child_state_of_a_missing_process_is_empty():
    assert child_state(2**31 - 1) == ""

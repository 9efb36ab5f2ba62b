import os
import subprocess
import sys
import time

import pytest

from muster.worker.session import age as module
from muster.worker.session.age import age, restart


@pytest.fixture(autouse=True)
def _began_long_ago(monkeypatch):
    monkeypatch.setattr(module, "_began", time.monotonic() - 100.0)


def test_age_counts_from_the_import():
    assert 100.0 <= age() <= age()


def test_age_counts_from_the_goodbye():
    restart()
    assert 0.0 <= age() < 100.0


def test_age_counts_from_an_exec_in_the_same_process():
    program = """
import os, sys, time
from muster.worker.session.age import age
if "again" not in sys.argv:
    time.sleep(1.0)
    print(time.monotonic(), flush=True)
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:], "again"])
print(time.monotonic(), age())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    ended, began, reported = map(float, done.stdout.split())
    assert reported <= began - ended + 0.1


def test_age_of_a_forked_child_counts_from_the_fork():
    mine, its = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(its, str(age()).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert float(os.read(mine, 100)) < 100.0
    for end in (mine, its):
        os.close(end)

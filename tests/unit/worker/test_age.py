import subprocess
import sys
import time
from pathlib import Path

import pytest

from muster.worker import age as module
from muster.worker.age import age, parted


@pytest.fixture(autouse=True)
def nobody_parted(monkeypatch):
    monkeypatch.setattr(module, "_parted_at", None)


def test_it_is_that_of_the_process_and_not_of_the_import():
    began = time.monotonic()
    program = "import time; time.sleep(0.5); from muster.worker.age import age; print(age())"
    told = float(subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout)
    assert 0.48 <= told <= time.monotonic() - began


def test_who_said_goodbye_begins_anew():
    before = age()
    parted()
    again = age()
    assert again < before
    assert again >= 0
    assert age() >= again


def test_it_is_nothing_where_the_kernel_does_not_tell(monkeypatch):
    monkeypatch.setattr(Path, "read_text", lambda _: "no such fields")
    assert age() == 0.0

"""How a worker gives way."""

import os
import subprocess

import pytest

from muster.worker.saves.writers.priority import Priority


@pytest.mark.parametrize(
    ("cpu", "io", "named"), [(20, None, "cpu_priority = 20"), (None, 4, "io_priority = 4")]
)
def test_priority_out_of_range_is_refused(cpu: int | None, io: int | None, named: str):
    with pytest.raises(ValueError, match=named):
        Priority(cpu, io)


def test_it_is_never_raised(monkeypatch: pytest.MonkeyPatch):
    taken: list[int] = []
    monkeypatch.setattr(os, "getpriority", lambda *_: 15)
    monkeypatch.setattr(os, "setpriority", lambda _kind, _who, nice: taken.append(nice))
    Priority(cpu=10).take()
    assert taken == [15]


def test_the_disks_class_is_set_by_ionice(monkeypatch: pytest.MonkeyPatch):
    commands: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda command, **_: commands.append(command))
    Priority(io=3).take()
    assert commands == [["ionice", "--class", "3", "--pid", str(os.getpid())]]


def test_a_worker_that_may_not_goes_on_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("PATH", "/nowhere")
    Priority(io=3).take()
    assert "keeps its priority" in caplog.text

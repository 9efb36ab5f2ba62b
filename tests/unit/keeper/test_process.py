"""What a keeper's process sets up."""

import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from muster.keeper.process import COPY_NICE, give_way, log_format


def test_log_lines_name_the_run():
    record = logging.LogRecord("muster.keeper.keeper", logging.INFO, "", 0, "copied %d bytes", (7,), None)
    line = logging.Formatter(log_format("50%s")).format(record)
    assert line.endswith(" INFO 50%s muster.keeper.keeper: copied 7 bytes")


def nice() -> int:
    """The nice value of the calling thread."""
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_thread_that_gives_way_leaves_the_others_their_priority():
    before = nice()
    with ThreadPoolExecutor(1, initializer=give_way) as threads:
        assert threads.submit(nice).result() == max(before, COPY_NICE)
    assert nice() == before


def test_copies_go_on_where_the_system_refuses_another_priority(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def refuse(which: int, who: int, priority: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "setpriority", refuse)
    with ThreadPoolExecutor(1, initializer=give_way) as threads:
        assert threads.submit(lambda: "copied").result() == "copied"
    assert "the fetches of copies keep their priority: [Errno 1] Operation not permitted" in caplog.text

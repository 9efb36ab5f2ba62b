"""The log of a keeper's process."""

import logging

from muster.keeper.process import log_format


def test_log_lines_name_the_run():
    record = logging.LogRecord("muster.keeper.keeper", logging.INFO, "", 0, "copied %d bytes", (7,), None)
    line = logging.Formatter(log_format("50%s")).format(record)
    assert line.endswith(" INFO 50%s muster.keeper.keeper: copied 7 bytes")

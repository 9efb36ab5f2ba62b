"""What all tests share."""

import atexit
import gc
import os
import threading
from collections.abc import Iterator

import pytest

from lab.patience import PATIENCE

# A test's process may import grpc before muster.worker, which then cannot do this; tests fork as well.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

_process = os.getpid()


@atexit.register  # Before all that tests import, and so run after their handlers.
def _leave() -> None:
    """Whoever hears the workers of xdist waits until they have ended: it takes seconds to take all down."""
    if "PYTEST_XDIST_WORKER" in os.environ and os.getpid() == _process:
        os._exit(0)


def pytest_addoption(parser: pytest.Parser) -> None:
    """For the tests whose worth grows with their length, and for those of what not every machine has."""
    parser.addoption(
        "--thorough",
        action="store_true",
        help="let the tests that run for longer at will do so: make thorough",
    )
    parser.addoption("--gpu", action="store_true", help="run the tests that need a GPU: make test-gpu")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Only the process that writes to the terminal has a reporter."""
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None:
        config.pluginmanager.register(Failures(terminal))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What was not asked for is not there, rather than skipped."""
    for option, marker in {"--thorough": "thorough_only", "--gpu": "gpu_only"}.items():
        if not config.getoption(option):
            left_out = [item for item in items if item.get_closest_marker(marker)]
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if item not in left_out]


class Failures:
    """Says at once which test has failed: of a run that is ended from outside nothing else is known."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called of each phase of each test."""
        if report.failed:
            where = report.longreprtext.rpartition("\n")[2]
            self._terminal.ensure_newline()
            self._terminal.write_line(f"{report.nodeid} ({report.when}, {report.duration:.0f} s): {where}")


@pytest.fixture
def thorough(request: pytest.FixtureRequest) -> bool:
    """Whether there is time."""
    return bool(request.config.getoption("--thorough"))


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    """A node that was not told to leave joins again, also where a later test plays the coordinator."""
    yield
    if _left_behind():
        gc.collect()  # A handler that was dropped ends what it has begun.
    for thread in _left_behind():
        thread.join(PATIENCE)
        assert not thread.is_alive(), f"{thread.name} goes on after its test"


def _left_behind() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name.startswith(("muster-node-", "muster-relay"))]

"""What all tests share."""

import atexit
import gc
import logging
import os
import threading
from collections.abc import Iterator

import hypothesis
import pytest

from lab.patience import PATIENCE

# A test's process may import grpc before muster.worker, which then cannot do this; tests fork as well.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# gRPC's core logs on threads of its own, between two tests as well, where pytest captures nothing.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

_process = os.getpid()


@atexit.register  # Before all that tests import, and so run after their handlers.
def _leave() -> None:
    """Skip the teardown of the interpreter: the controller of xdist waits seconds for it."""
    if "PYTEST_XDIST_WORKER" in os.environ and os.getpid() == _process:
        os._exit(0)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add options for tests that gain by running longer, and for tests that need a GPU."""
    parser.addoption("--thorough", action="store_true", help="run some tests for longer: make thorough")
    parser.addoption("--gpu", action="store_true", help="run the tests that need a GPU: make test-gpu")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Show each failure at once. Only the process that writes to the terminal has a reporter.

    Hypothesis tries the same examples each time, so that a run says something of the change that it tests.
    Thorough runs look for new ones.
    """
    hypothesis.settings.register_profile("repeatable", derandomize=True)
    if not config.getoption("--thorough"):
        hypothesis.settings.load_profile("repeatable")
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None:
        config.pluginmanager.register(Failures(terminal))


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Let xdist say nothing of its processes under ``-q``."""
    reporter = session.config.pluginmanager.get_plugin("terminaldistreporter")
    if reporter is not None and session.config.option.verbose < 0:
        reporter.ensure_show_status = lambda: None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out, rather than skip, the tests that need an option that was not given."""
    for option, marker in {"--thorough": "thorough_only", "--gpu": "gpu_only"}.items():
        if not config.getoption(option):
            left_out = [item for item in items if item.get_closest_marker(marker)]
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if item not in left_out]


class Failures:
    """Prints each failure at once, so that a run that is killed has shown its failures."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Print a failure of any phase of a test."""
        if report.failed:
            where = report.longreprtext.rpartition("\n")[2]
            self._terminal.ensure_newline()
            self._terminal.write_line(f"{report.nodeid} ({report.when}, {report.duration:.0f} s): {where}")


@pytest.fixture
def thorough(request: pytest.FixtureRequest) -> bool:
    """Return whether the test may run for longer."""
    return bool(request.config.getoption("--thorough"))


@pytest.fixture(autouse=True)
def _no_node_is_left_behind() -> Iterator[None]:
    """Wait for the test's nodes to leave: a node joins again, even if a later test plays the coordinator."""
    yield
    _wait_for("muster-node-", "muster-relay")


@pytest.fixture(autouse=True, scope="module")
def _no_session_is_left_behind() -> Iterator[None]:
    """Wait for the module's sessions to end: one connects again, even if a later test plays its channel."""
    yield
    _wait_for("muster-session-")


def _wait_for(*prefixes: str) -> None:
    """Wait until no thread with such a name is left."""
    if _running(prefixes):
        gc.collect()  # A handler that was dropped ends its node.
    for thread in _running(prefixes):
        thread.join(PATIENCE)
        assert not thread.is_alive(), f"{thread.name} goes on after its test"


def _running(prefixes: tuple[str, ...]) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(prefixes)]


@pytest.fixture(autouse=True)
def _log_is_not_set_up() -> Iterator[None]:
    """Refuse a test that sets up the log of ``muster serve``: later tests' log lines would go to stderr."""
    yield
    root = logging.getLogger()
    for handler in root.handlers[:]:
        if type(handler).__module__.startswith("muster."):
            root.removeHandler(handler)
            pytest.fail("the test set up the log of its own process: run the command in another process")

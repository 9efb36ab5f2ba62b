"""A launcher passes signals on to its worker and ends as it does, or becomes the worker itself."""

import contextlib
import json
import os
import py_compile
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from lab.patience import PATIENCE, until
from muster.preload import launcher
from muster.preload.messages import (
    FORWARDED,
    SOCKET_VARIABLE,
    ProcessContext,
    Refused,
    Started,
    StartRequest,
    decode_reply,
)
from tests.integration.preload.launchers import INHERITED, LAUNCHER, Node, node

TELLS = """
import os, signal, sys, time

def handle(number, frame):
    print("signal", number)
    sys.exit(7)

signal.signal(signal.SIGTERM, handle)
ready, tells = os.pipe()
child = os.fork()
if child == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.write(tells, b"1")  # A signal before, amid the fork, could be lost.
    while True:
        signal.pause()
os.read(ready, 1)
print(os.getpid(), os.getppid(), child, "preloaded" if "colorsys" in sys.modules else "own")
while True:
    signal.pause()
"""
OWN = "muster-python: this worker starts without preloaded modules: "


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A program that tells of its processes, and waits."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tells.py").write_text(TELLS)
    return "tells.py"


@pytest.fixture
def here(script: str) -> Iterator[Node]:
    with node("colorsys") as made:
        yield made


def told(process: "subprocess.Popen[str]") -> list[Any]:
    """Return the processes of the worker, of its parent and of its child, and where its imports are from."""
    assert process.stdout is not None
    *pids, kind = process.stdout.readline().split()
    return [*map(int, pids), kind]


def ended(pid: int) -> bool:
    """Return whether a process has ended; nobody may have waited for it."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", 0),
        ("raise SystemExit(3)", 3),
        ("import os; os._exit(200)", 200),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
        ("import os; os.abort()", -signal.SIGABRT),
        ("import os; os.kill(os.getpid(), 15)", -signal.SIGTERM),
    ],
)
def test_launcher_ends_as_its_worker(here: Node, tmp_path: Path, text: str, code: int):
    (tmp_path / "ends.py").write_text(text)
    assert here.run("-u", "ends.py") == (code, "", "")


def test_signal_of_the_agent_reaches_the_worker(here: Node, script: str):
    with here.start("-u", script) as process:
        _, parent, child, kind = told(process)
        assert (parent != process.pid, kind) == (True, "preloaded")
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(PATIENCE) == 7
        os.kill(child, signal.SIGKILL)
        assert process.stdout is not None
        assert process.stdout.read() == f"signal {signal.SIGTERM:d}\n"


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT, signal.SIGQUIT])
def test_signal_reaches_the_worker_and_its_children(here: Node, script: str, number: signal.Signals):
    with here.start("-u", script) as process:
        worker, _, child, _ = told(process)
        process.send_signal(number)
        assert process.wait(PATIENCE) == -number  # SIGINT too: Python ends by it after a KeyboardInterrupt.
        until(lambda: ended(worker) and ended(child))


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_signal_of_a_user_reaches_the_worker_alone(here: Node, script: str, number: signal.Signals):
    with here.start("-u", script) as process:
        *_, child, _ = told(process)
        process.send_signal(number)
        assert process.wait(PATIENCE) == -number
        assert not ended(child)
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("number", FORWARDED)
def test_signal_to_all_processes_does_not_end_the_fork_server(
    here: Node, script: str, number: signal.Signals
):
    """As ``scancel`` sends it. The workers can save then."""
    with here.start("-u", script) as process:
        _, server, child, _ = told(process)
        os.kill(server, number)
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(PATIENCE) == 7
        os.kill(child, signal.SIGKILL)
    assert here.run("-u", "-c", "pass")[2].startswith(f"{OWN}Python's arguments are")


def test_killed_launcher_takes_its_worker_along(here: Node, script: str):
    with here.start("-u", script) as process:
        worker, _, child, _ = told(process)
        process.kill()
        until(lambda: ended(worker) and ended(child))


def test_killed_fork_server_takes_workers_along_and_says_so(here: Node, script: str):
    with here.start("-u", script) as process:
        worker, server, child, _ = told(process)
        os.kill(server, signal.SIGKILL)
        _, error = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert error.startswith(
        f"muster-python: the fork server of this node was killed. So worker {worker} was killed"
    )
    until(lambda: ended(worker) and ended(child))
    code, _, error = here.run("-u", "-m", "this")
    assert (code, error) == (0, f"{OWN}{launcher.NO_SERVER}.\n")


def test_orphan_of_a_killed_launcher_and_fork_server_ends(here: Node, tmp_path: Path):
    """The launcher is killed first, and then the fork server, which has not seen that."""
    (tmp_path / "stays.py").write_text(
        "import os, signal\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print(os.getpid())\n"
        "signal.pause()\n"
    )
    with here.start("-u", "stays.py") as process:
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        server = psutil.Process(here.server)
        server.suspend()
        until(lambda: server.status() == psutil.STATUS_STOPPED)
        process.kill()
        process.wait()
        server.kill()
        until(lambda: ended(worker))


def test_signal_before_the_worker_ends_the_launcher_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The fork server still imports."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "slow.py").write_text("open('gate').read()\n")
    (tmp_path / "runs.py").write_text("open('ran', 'w')\n")
    (tmp_path / "ends.py").write_text("")
    os.mkfifo("gate")
    with node("slow", PYTHONPATH=str(tmp_path)) as here:
        with here.start("-u", "runs.py") as process:
            until(lambda: has_socket(process.pid))
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE) == -signal.SIGTERM
        Path("gate").write_text("")
        assert here.run("-u", "ends.py")[0] == 0  # After the first request.
        until(lambda: not psutil.Process(here.server).children())
        assert not Path("ran").exists()


def has_socket(pid: int) -> bool:
    """Return whether a process has a socket."""
    return any(target.startswith("socket:") for target in _targets(pid))


def _targets(pid: int) -> Iterator[str]:
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # Closed meanwhile.
            yield str(file.readlink())


@pytest.mark.parametrize(
    ("command", "variables", "reason"),
    [
        (("-u", "tells.py"), {"LD_LIBRARY_PATH": "/lib"}, "its environment differs .* in LD_LIBRARY_PATH"),
        (("-u", "-X", "dev", "tells.py"), {}, "Python's arguments are -u -X dev tells.py"),
        (("-u", "absent.py"), {}, "absent.py cannot be read: No such file or directory"),
    ],
)
def test_worker_that_cannot_be_forked_starts_by_itself(
    here: Node, command: tuple[str, ...], variables: dict[str, str], reason: str
):
    with here.start(*command, program=LAUNCHER, folder=None, **variables) as process:
        if "absent.py" not in command:
            worker, _, child, kind = told(process)
            assert (worker, kind) == (process.pid, "own")
            os.killpg(process.pid, signal.SIGKILL)
            os.kill(child, signal.SIGKILL)
        _, error = process.communicate(timeout=PATIENCE)
    assert re.fullmatch(f"{OWN}{reason}\\.", error.splitlines()[0])


def test_script_of_bytecode_runs_by_itself(here: Node, tmp_path: Path):
    (tmp_path / "ends.py").write_text("print('done')")
    py_compile.compile(str(tmp_path / "ends.py"), str(tmp_path / "ends.pyc"))
    assert here.run("-u", "ends.pyc") == (0, "done\n", f"{OWN}ends.pyc is no source file.\n")


def test_python_by_another_name_is_the_same(here: Node, tmp_path: Path):
    (tmp_path / "ends.py").write_text("")
    python3 = Path(sys.executable).with_name("python3")
    assert here.run(LAUNCHER, "-u", "ends.py", program=str(python3)) == (0, "", "")


def test_worker_elsewhere_or_on_other_cores_starts_by_itself(here: Node, tmp_path: Path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "ends.py").write_text("")
    code, _, error = here.run("-u", "ends.py", folder=tmp_path / "elsewhere")
    assert (code, error) == (
        0,
        f"{OWN}it starts in {tmp_path}/elsewhere, and the fork server in {tmp_path}.\n",
    )
    (tmp_path / "ends.py").write_text("")
    core = str(min(os.sched_getaffinity(0)))
    code, _, error = here.run("-c", core, LAUNCHER, "-u", "ends.py", program="taskset")
    assert (code, error) == (0, f"{OWN}it is bound to other processor cores than the fork server.\n")


def test_module_that_cannot_be_preloaded_is_reported_once(script: str, capfd: pytest.CaptureFixture[str]):
    with node("no_such") as here, here.start("-u", script) as process:
        worker, _, child, _ = told(process)
        assert worker == process.pid
        os.killpg(process.pid, signal.SIGKILL)
        os.kill(child, signal.SIGKILL)
        _, error = process.communicate(timeout=PATIENCE)
    assert error == f"{OWN}{launcher.NO_SERVER}.\n"
    assert capfd.readouterr().err == (
        "muster-python: workers start without preloaded modules: no_such cannot be imported: "
        "ModuleNotFoundError(\"No module named 'no_such'\"). Correct MUSTER_PRELOAD.\n"
    )


def test_worker_without_a_fork_server_is_python(script: str, tmp_path: Path):
    environment = {name: os.environ[name] for name in INHERITED if name in os.environ}
    (tmp_path / "ends.py").write_text("print('done')")
    done = subprocess.run(
        [LAUNCHER, "-u", "ends.py"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


AGENT = """
import json, os, signal
from muster.worker.node.fork_server import ForkServerProcess
server = ForkServerProcess(["colorsys"])
print(json.dumps(dict(os.environ)), flush=True)
signal.pause()
"""


def test_fork_server_of_a_killed_agent_ends_after_its_workers(script: str):
    environment = {name: os.environ[name] for name in INHERITED if name in os.environ}
    with subprocess.Popen(
        [sys.executable, "-c", AGENT], env=environment, stdout=subprocess.PIPE, text=True
    ) as agent:
        assert agent.stdout is not None
        here = Node(json.loads(agent.stdout.readline()))
        path = Path(here.environment[SOCKET_VARIABLE])
        with here.start("-u", script) as process:
            _, server, child, kind = told(process)
            assert kind == "preloaded"
            agent.kill()
            agent.wait()
            until(lambda: _refuses(path))
            assert not ended(server)
            process.terminate()
            assert process.wait(PATIENCE) == 7
            os.kill(child, signal.SIGKILL)
        until(lambda: ended(server) and not path.parent.exists())


def _refuses(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        try:
            connection.connect(str(path))
        except ConnectionRefusedError:
            return True
    return False


PRINT_REQUEST = """
from muster.preload.messages import ProcessContext, StartRequest
print(StartRequest(("-u", "runs.py"), ProcessContext.current()).encode().decode())
"""


def connect(here: Node) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(here.environment[SOCKET_VARIABLE])
    return connection


def test_launcher_that_gives_up_has_no_worker(here: Node, tmp_path: Path):
    """It becomes the worker itself, so another one must not run."""
    (tmp_path / "runs.py").write_text("open('ran', 'w')")
    code, output, _ = here.run("-c", PRINT_REQUEST, program=sys.executable)
    assert code == 0
    request = output.strip().encode()
    with connect(here) as connection, Path(os.devnull).open() as null:
        socket.send_fds(connection, [request], [null.fileno()] * 3)
        assert isinstance(decode_reply(connection.recv(1024)), Started)
        until((tmp_path / "ran").exists)
    (tmp_path / "ran").unlink()
    with connect(here) as connection, Path(os.devnull).open() as null:
        server = psutil.Process(here.server)
        server.suspend()
        until(lambda: server.status() == psutil.STATUS_STOPPED)
        socket.send_fds(connection, [request], [null.fileno()] * 3)
        connection.close()
        server.resume()
    (tmp_path / "ends.py").write_text("")
    assert here.run("-u", "ends.py") == (0, "", "")  # After it, since there is one thread.
    until(lambda: not server.children())
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("message", [b"{", b"[]", b"{}", json.dumps({"command": 1, "context": {}}).encode()])
@pytest.mark.parametrize("files", [0, 1, 3])
def test_hostile_message_ends_no_fork_server(here: Node, tmp_path: Path, message: bytes, files: int):
    with connect(here) as connection, Path(os.devnull).open() as null:
        socket.send_fds(connection, [message], [null.fileno()] * files)
        assert isinstance(decode_reply(connection.recv(1024)), Refused)
    (tmp_path / "ends.py").write_text("")
    assert here.run("-u", "ends.py") == (0, "", "")


@pytest.fixture
def signals() -> Iterator[launcher._Signals]:
    """What a launcher catches."""
    before = {number: signal.getsignal(number) for number in FORWARDED}
    caught = launcher._Signals()
    yield caught
    caught.restore()
    for number, handler in before.items():
        signal.signal(number, handler)


def test_launcher_does_not_wait_for_imports_for_ever(
    monkeypatch: pytest.MonkeyPatch, signals: launcher._Signals
):
    monkeypatch.setattr(launcher, "START_TIMEOUT", 0.01)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        reply = launcher._ask(ours, StartRequest(("-u", "train.py"), ProcessContext.current()), signals)
    assert reply == Refused("the fork server was not ready within 0.01 s")


def test_request_that_is_too_large_is_not_sent(signals: launcher._Signals):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        request = StartRequest(("-u", "train.py", "x" * (8 << 20)), ProcessContext.current())
        reply = launcher._ask(ours, request, signals)
    assert isinstance(reply, Refused)
    assert reply.reason.endswith("bytes, more than 196,608")


def test_fork_server_is_left_alone_by_a_forked_child_and_by_another_one(tmp_path: Path):
    """A handler that is collected later than the next one was made, or in a child that has a copy of it."""
    program = tmp_path / "agent.py"
    program.write_text(
        "import os\n"
        "from muster.preload.messages import SOCKET_VARIABLE\n"
        "from muster.worker.node.fork_server import ForkServerProcess\n"
        "first = ForkServerProcess(['colorsys'])\n"
        "path = os.environ[SOCKET_VARIABLE]\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    first.stop()\n"
        "    os._exit(0)\n"
        "os.waitpid(child, 0)\n"
        "assert os.path.exists(path)\n"
        "second = ForkServerProcess(['colorsys'])\n"
        "first.stop()\n"
        "assert not os.path.exists(path)\n"
        "assert os.path.exists(os.environ[SOCKET_VARIABLE])\n"
        "second.stop()\n"
        "assert SOCKET_VARIABLE not in os.environ\n"
    )
    done = subprocess.run([sys.executable, str(program)], timeout=PATIENCE, check=False)
    assert done.returncode == 0

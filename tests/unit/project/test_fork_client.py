"""What tests start programs by: they end, speak and spawn as those that Python itself starts."""

import multiprocessing
import os
import signal
import subprocess
import sys
from multiprocessing.connection import Connection

import pytest

from lab.patience import PATIENCE
from lab.processes import fork_client


@pytest.fixture(autouse=True)
def _forks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_client, "forks", True)


def run(program: str, **options: object) -> "subprocess.CompletedProcess[str]":
    return fork_client.run([sys.executable, "-c", program], imports=(), timeout=PATIENCE, **options)


@pytest.mark.parametrize(
    ("program", "code", "out", "log"),
    [
        ("print('well')", 0, "well\n", ""),
        ("import sys; print('said'); sys.exit(7)", 7, "said\n", ""),
        ("import sys; sys.exit('why')", 1, "", "why\n"),
        ("1 / 0", 1, "", "ZeroDivisionError: division by zero\n"),
        ("import os; os._exit(9)", 9, "", ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, "", ""),
        ("raise KeyboardInterrupt", -signal.SIGINT, "", "KeyboardInterrupt\n"),
        ("import atexit; atexit.register(print, 'last'); print('first')", 0, "first\nlast\n", ""),
        ("import threading; threading.Thread(target=print, args=['thread']).start()", 0, "thread\n", ""),
    ],
)
def test_it_ends_as_python_does(program: str, code: int, out: str, log: str):
    done = run(program)
    assert (done.returncode, done.stdout) == (code, out)
    assert done.stderr.endswith(log)
    assert bool(done.stderr) is bool(log)


def test_handlers_of_the_exit_are_run_also_those_from_before_the_fork():
    program = "import multiprocessing.util as m; m.Finalize(None, print, ['finalized'], exitpriority=0)"
    assert run(program).stdout == "finalized\n"


def test_started_program_is_a_child_of_the_caller_and_gets_arguments_and_environment():
    program = (
        "import os, sys; print(os.getppid(), os.getsid(0) == os.getpid(), os.environ['GIVEN'], sys.argv[1:])"
    )
    command = [sys.executable, "-c", program, "one", "two"]
    with fork_client.popen(
        command, imports=(), env={"GIVEN": "this"}, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as child:
        said, _ = child.communicate(timeout=PATIENCE)
    assert said == f"{os.getpid()} True this ['one', 'two']\n"
    assert "GIVEN" not in run("import os; print(*os.environ)").stdout


def test_it_can_be_spoken_to_and_killed():
    command = [sys.executable, "-c", "import sys; print(input(), flush=True); input()"]
    with fork_client.popen(
        command, imports=(), text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        print("hello", file=child.stdin, flush=True)
        assert child.stdout.readline() == "hello\n"
        assert child.poll() is None
        child.kill()
        assert child.wait(PATIENCE) == -signal.SIGKILL


def test_it_can_be_ended_though_signals_were_blocked_when_the_first_was_started():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        command = [sys.executable, "-c", "import signal; signal.pause()"]
        child = fork_client.popen(command, imports=("colorsys",))
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    child.terminate()
    assert child.wait(PATIENCE) == -signal.SIGTERM


def test_files_may_have_any_numbers():
    numbers = (204, 203, 205)
    there = [os.open(os.devnull, os.O_RDONLY) for _ in numbers]
    ours, theirs = zip(*(os.pipe() for _ in numbers), strict=True)
    write = ";".join(f"__import__('os').write({number}, b'{number}')" for number in numbers)
    files = {number: there[0] for number in range(3)} | dict(zip(numbers, theirs, strict=True))
    pid = fork_client.fork_server().fork(["-c", write], os.environ, files)
    assert os.waitpid(pid, 0)[1] == 0
    assert [os.read(file, 10) for file in ours] == [str(number).encode() for number in numbers]
    for file in (*there, *ours, *theirs):
        os.close(file)


def _answer(pipe: Connection) -> None:
    pipe.send(os.getppid())


def test_spawned_multiprocessing_process_is_a_child_of_the_caller():
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with fork_client.spawning(fork_client.fork_server("colorsys")):
        process = context.Process(target=_answer, args=(theirs,))
        process.start()
    theirs.close()
    assert ours.recv() == os.getpid()
    process.join(PATIENCE)
    assert process.exitcode == 0
    ours.close()

"""A forked worker is as one that Python has started, but for its imports."""

import contextlib
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.preload.launchers import LAUNCHER, Node, node

FACTS = """
import json, os, pickle, signal, stat, sys, threading

class Thing:
    pass

assert type(pickle.loads(pickle.dumps(Thing()))) is Thing
print(json.dumps({
    "argv": sys.argv,
    "orig_argv": sys.orig_argv[1:],
    "file": __file__,
    "name": __name__,
    "package": __package__,
    "builtins": __builtins__.__name__,
    "loader": type(__loader__).__name__,
    "spec": __spec__ and __spec__.name,
    "path": sys.path,
    "folder": os.getcwd(),
    "variables": sorted((one, it) for one, it in os.environ.items() if one != "MUSTER_PRELOAD_SOCKET"),
    "streams_are_the_first": [getattr(sys, one) is getattr(sys, f"__{one}__") for one in ("stdin", "stdout")],
    "rank": os.environ.get("RANK"),
    "files": [
        (n, stat.S_IFMT(os.fstat(n).st_mode))
        for n in range(64) if os.path.lexists(f"/proc/self/fd/{n}")
    ],
    "leads_its_session": os.getsid(0) == os.getpid() == os.getpgid(0),
    "threads": threading.active_count(),
    "signals": [(int(one), str(signal.getsignal(one))) for one in signal.valid_signals()],
    "blocked": list(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "streams": [
        (one.name, one.encoding, one.errors, one.newlines, one.line_buffering, one.write_through,
         one.seekable(), type(one.buffer).__name__)
        for one in (sys.stdout, sys.stderr)
    ],
    "input": (sys.stdin.read(), sys.stdin.encoding, sys.stdin.errors, type(sys.stdin.buffer).__name__),
    "flags": list(sys.flags),
}))
"""
MAIN = """
import multiprocessing

def square(number):
    return number * number

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(square, [3]))
"""
WAITS = """
import signal
print("waits")
signal.pause()
"""
FAILS = """
def fail():
    raise ValueError("no data")

fail()
"""
IS_INTERRUPTED = FAILS.replace('ValueError("no data")', "KeyboardInterrupt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with programs."""
    folder = tmp_path_factory.mktemp("job")
    programs = {
        "facts": FACTS,
        "spawning": MAIN,
        "fails": FAILS,
        "is_interrupted": IS_INTERRUPTED,
        "waits": WAITS,
    }
    for name, text in programs.items():
        (folder / f"{name}.py").write_text(text)
    (folder / "link.py").symlink_to("facts.py")
    return folder


@pytest.fixture(scope="module")
def here(folder: Path) -> Iterator[Node]:
    """A node with a fork server, in that folder."""
    with contextlib.chdir(folder), node() as made:
        yield made


def facts(here: Node, folder: Path, *command: str, program: str = LAUNCHER, **variables: str) -> object:
    """Return what a program finds in its process."""
    code, output, error = here.run(*command, program=program, folder=folder, **variables)
    assert (code, error) == (0, "")  # A worker that was not forked says so.
    return json.loads(output)


@pytest.mark.parametrize("name", ["facts.py", "link.py"])
@pytest.mark.parametrize("absolute", [True, False])
def test_script_sees_the_same_process_as_under_python(here: Node, folder: Path, name: str, absolute: bool):
    command = ("-u", str(folder / name) if absolute else name, "--lr", "1")
    python = facts(here, folder, *command, program=sys.executable, RANK="5")
    assert facts(here, folder, *command, RANK="5") == python


def test_worker_has_no_files_of_other_workers(here: Node, folder: Path):
    command = ("-u", "facts.py")
    python = facts(here, folder, *command, program=sys.executable)
    with here.start("-u", "waits.py", folder=folder) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "waits\n"
        assert facts(here, folder, *command) == python
        other.kill()


def test_module_sees_the_same_process_as_under_python(here: Node, folder: Path):
    command = ("-u", "-m", "facts", "-v")
    assert facts(here, folder, *command) == facts(here, folder, *command, program=sys.executable)


@pytest.mark.parametrize(("name", "code"), [("fails.py", 1), ("is_interrupted.py", -signal.SIGINT)])
def test_error_is_printed_as_under_python(here: Node, folder: Path, name: str, code: int):
    python = here.run("-u", name, program=sys.executable, folder=folder)
    assert here.run("-u", name, folder=folder) == python
    assert python[0] == code


def test_worker_can_spawn_processes(here: Node, folder: Path):
    assert here.run("-u", "spawning.py", folder=folder) == (0, "[9]\n", "")


def test_workers_differ_in_their_random_numbers(tmp_path: Path):
    """Python, numpy and torch seed their generators at their import."""
    script = tmp_path / "random_numbers.py"
    script.write_text(
        "import random, sys\n"
        "assert {'numpy', 'torch'} <= sys.modules.keys()\n"
        "import numpy, torch\n"
        "print(random.random(), numpy.random.rand(), torch.rand(1).item())\n"
    )
    # Modules of torch read all variables at their import, which no worker's own may be among.
    inherited = {"RANK": "7", "MASTER_ADDR": "a", "MUSTER_ENDPOINT": "a:1", "CUDA_VISIBLE_DEVICES": "0"}
    with node("torch", "numpy", **inherited) as here:
        first, second = (here.run("-u", str(script), RANK=rank) for rank in "01")
    assert first[0] == second[0] == 0, first
    assert not set(first[1].split()) & set(second[1].split())

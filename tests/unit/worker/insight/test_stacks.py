"""Where threads stand, told by another thread."""

import gc
import subprocess
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from lab.patience import PATIENCE
from muster.v1 import insight_pb2 as pb
from muster.worker.insight import stacks
from muster.worker.insight.stacks import MAX_FRAMES, MAX_NAME, MAX_THREADS, is_library

Stand = Callable[[Any, Any], None]


def wait_in_a_lock(here: Any, gate: Any) -> None:
    # Calls of C functions only: they have no frames of their own.
    here.release()
    gate.acquire()


def renamed(**names: str) -> Stand:
    """The same function under another name or in another file, as nobody would write it."""
    code: Any = wait_in_a_lock.__code__
    return types.FunctionType(code.replace(**names), {})


@contextmanager
def standing(stand: Stand = wait_in_a_lock, name: str = "stands") -> Iterator[threading.Thread]:
    """A thread that stands where it is until the end."""
    here, gate = threading.Lock(), threading.Lock()
    here.acquire()
    gate.acquire()
    thread = threading.Thread(target=stand, args=(here, gate), name=name)
    thread.start()
    try:
        assert here.acquire(timeout=PATIENCE)
        yield thread
    finally:
        gate.release()
        thread.join()


def asked(most: int = 10_000) -> tuple[list[pb.Thread], int]:
    """What another thread is told; threads of other tests may stand in this process as well."""
    with ThreadPoolExecutor(1, "asks") as pool:
        return pool.submit(stacks.threads, most).result()


def reported(name: str = "stands") -> pb.Thread:
    (thread,) = [thread for thread in asked()[0] if thread.name == name]
    return thread


def test_waiting_thread_has_function_file_and_line():
    with standing():
        thread = reported()
    first = wait_in_a_lock.__code__.co_firstlineno
    innermost = thread.frames[0]
    assert (innermost.function, innermost.file, innermost.library) == ("wait_in_a_lock", __file__, False)
    assert first < innermost.line <= first + 3
    assert [frame.function for frame in thread.frames[1:]] == [
        "Thread.run",
        "Thread._bootstrap_inner",
        "Thread._bootstrap",
    ]
    assert all(frame.library for frame in thread.frames[1:])
    assert (thread.main, thread.frames_left_out) == (False, 0)


def test_function_is_named_with_its_class():
    class Trainer:
        def step(self, here: Any, gate: Any) -> None:
            wait_in_a_lock(here, gate)

    with standing(Trainer().step):
        assert reported().frames[1].function.endswith("Trainer.step")


def test_main_thread_comes_first_without_the_asking_thread():
    with standing(name="one"), standing(name="two"):
        threads, left_out = asked()
    assert [thread.main for thread in threads] == [True] + [False] * (len(threads) - 1)
    assert threads[0].name == "MainThread"
    assert "asked" in [frame.function for frame in threads[0].frames]
    names = [thread.name for thread in threads]
    assert names.index("one") < names.index("two"), "as they were started"
    assert not any(name.startswith("asks") for name in names)
    assert left_out == 0


def test_deep_recursion_keeps_the_innermost_frames():
    def recur(depth: int, here: Any, gate: Any) -> None:
        if depth == 0:
            wait_in_a_lock(here, gate)
        else:
            recur(depth - 1, here, gate)

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    try:
        with standing(lambda here, gate: recur(10_000, here, gate)):
            thread = reported()
    finally:
        sys.setrecursionlimit(limit)
    assert thread.frames[0].function == "wait_in_a_lock"
    assert {frame.function.rpartition(".")[2] for frame in thread.frames[1:]} == {"recur"}
    assert len(thread.frames) == MAX_FRAMES
    assert len(thread.frames) + thread.frames_left_out == 10_000 + 1 + 1 + 1 + 3


def test_main_thread_is_kept_if_there_are_too_many(monkeypatch: pytest.MonkeyPatch):
    idents = [*range(1, 101), threading.main_thread().ident]
    monkeypatch.setattr(sys, "_current_frames", lambda: dict.fromkeys(idents, sys._getframe()))
    threads, left_out = asked(MAX_THREADS)
    assert len(threads) == MAX_THREADS
    assert threads[0].main
    assert threads[0].frames
    assert left_out == 101 - MAX_THREADS


def test_foreign_thread_is_named_by_its_number(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "_current_frames", lambda: {0xBEEF: sys._getframe()})
    assert [thread.name for thread in asked()[0]] == ["MainThread", "0xbeef"]


def test_main_thread_without_frames_is_listed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "_current_frames", dict)
    assert asked() == ([pb.Thread(name="MainThread", main=True)], 0)


def test_main_thread_of_an_ended_program_has_no_frames():
    """The interpreter still waits for the other threads: it stands in a function of Python's own."""
    program = """
import threading
from muster.worker.insight import stacks

def ask():
    threading.main_thread().join()
    print(stacks.threads())

threading.Thread(target=ask).start()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == '([name: "MainThread"\nmain: true\n], 0)\n'


def test_odd_names_are_encoded_as_utf_8():
    with standing(renamed(co_qualname="\x1b[31m<b>\udcff", co_filename="/\udcfe/€\n.py"), "\ud800\x07"):
        (thread,) = [thread for thread in asked()[0] if "\x07" in thread.name]
    assert thread.name == "\\ud800\x07"
    assert thread.frames[0].function == "\x1b[31m<b>\\udcff"
    assert thread.frames[0].file == "/\\udcfe/€\n.py"
    assert pb.Thread.FromString(thread.SerializeToString()) == thread


@pytest.mark.parametrize("letter", ["x", "€", "\udcff"])
def test_long_names_keep_their_start_and_long_paths_their_end(letter: str):
    long = letter * 5_000
    with standing(renamed(co_qualname=f"step{long}", co_filename=f"/{long}/train.py"), f"stands{long}"):
        (thread,) = [thread for thread in asked()[0] if thread.name.startswith("stands")]
    frame = thread.frames[0]
    assert frame.function.startswith("step")
    assert frame.file.endswith("/train.py")
    assert (thread.name[-1], frame.function[-1], frame.file[0]) == ("…", "…", "…")
    for name in (thread.name, frame.function, frame.file):
        assert MAX_NAME - 10 < len(name.encode()) <= MAX_NAME


def test_name_of_the_maximum_length_is_not_cut():
    name = "x" * MAX_NAME
    with standing(renamed(co_qualname=name, co_filename=name)):
        frame = reported().frames[0]
    assert (frame.function, frame.file) == (name, name)


@pytest.mark.parametrize(
    ("file", "library"),
    [
        ("/home/me/train.py", False),
        ("train.py", False),
        ("<string>", False),
        ("<stdin>", False),
        ("/home/me/muster/train.py", False),
        ("/opt/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", True),
        ("/usr/lib/python3/dist-packages/torch/optim/adam.py", True),
        ("<frozen runpy>", True),
        (threading.__file__, True),
        (stacks.__file__, True),
        (pb.__file__, True),
        (__file__, False),
    ],
)
def test_library_files_are_told_apart_from_the_programs(file: str, library: bool):
    assert is_library(file) is library


def test_stacks_keep_no_object_alive():
    class Tensor:
        pass

    held: list[weakref.ref[Tensor]] = []

    def hold(here: Any, gate: Any) -> None:
        tensor = Tensor()
        held.append(weakref.ref(tensor))
        wait_in_a_lock(here, gate)

    gc.disable()
    try:
        with standing(hold):
            assert "hold" in reported().frames[1].function
            assert held[0]() is not None
        assert held[0]() is None
    finally:
        gc.enable()

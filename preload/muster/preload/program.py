"""Runs a program in this process as Python would have if it had been started with it."""

import builtins
import importlib.machinery
import io
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TextIO

from muster.preload.messages import Command

STANDARD_FILES = 3
"""Standard input, output and error have the numbers from 0 up."""


def become(environment: Mapping[str, str], files: Sequence[int]) -> None:
    """Take over what a worker has of its own.

    Args:
        environment: all variables.
        files: its standard input, output and error, which are closed under their present numbers.
    """
    for number, file in enumerate(files):
        os.dup2(file, number)
    for file in files:
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    _open_streams()
    _seed()


def _seed() -> None:
    """Give the global random generators a seed of their own. Python's module ``random`` does so by itself."""
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()


def _open_streams() -> None:
    """Replace the streams: Python's remember of their files whether they are a terminal, or can be sought.

    As with Python's option ``-u``, output is not buffered.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = _stream(number, f"<{name}>", vars(sys)[f"__{name}__"])
        vars(sys).update({name: stream, f"__{name}__": stream})


def _stream(number: int, name: str, previous: TextIO) -> io.TextIOWrapper:
    file = io.FileIO(number, "r" if number == 0 else "w", closefd=False)
    file.name = name
    return io.TextIOWrapper(
        io.BufferedReader(file) if number == 0 else file,
        encoding=previous.encoding,
        errors=previous.errors,
        newline=None if number == 0 else "\n",
        line_buffering=file.isatty(),
        write_through=number != 0,
    )


def run(command: Command) -> None:
    """Run a script or a module as ``__main__``.

    Raises:
        SystemExit: the program asks for it, or has failed; its traceback has been printed then.
        KeyboardInterrupt: it was interrupted; its traceback has been printed.
    """
    sys.orig_argv = [sys.executable, "-u", *(["-m"] if command.is_module else []), command.target]
    sys.orig_argv.extend(command.arguments)
    sys.argv = [command.target, *command.arguments]
    try:
        if command.is_module:
            _prepend_path(str(Path.cwd()))
            _replace_main()
            runpy._run_module_as_main(command.target)  # type: ignore[attr-defined]  # As ``python -m`` does.
        else:
            _prepend_path(os.path.dirname(os.path.realpath(command.target)))  # noqa: PTH120
            _run_script(command.target)
    except (Exception, KeyboardInterrupt) as error:
        trace = _of_program(error.__traceback__)
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        if isinstance(error, Exception):
            sys.exit(1)
        sys.excepthook = lambda *_: None  # Python prints nothing more, and ends by SIGINT.
        raise


def _of_program(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames of this module."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def _prepend_path(folder: str) -> None:
    if not sys.flags.safe_path:
        sys.path.insert(0, folder)


def _run_script(path: str) -> None:
    path = os.path.abspath(path)  # noqa: PTH100  # Links stay as they are, as with Python.
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    main = _replace_main()
    main.__file__ = path
    vars(main)["__cached__"] = None
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    exec(code, vars(main))


def _replace_main() -> ModuleType:
    """Make a new ``__main__``: that of this process has names of its own."""
    main = ModuleType("__main__")
    vars(main)["__builtins__"] = builtins
    sys.modules["__main__"] = main
    return main

"""What a process must not have if workers are to be forked from it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lab.patience import PATIENCE
from muster.preload import imports
from muster.preload.imports import PreloadError, find_obstacle, preload


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of a process as Linux shows them: one thread, and a file."""
    (tmp_path / "task" / "1").mkdir(parents=True)
    (tmp_path / "fd").mkdir()
    (tmp_path / "fd" / "0").symlink_to("/dev/null")
    monkeypatch.setattr(imports, "PROCESS", tmp_path)
    monkeypatch.setattr(imports, "_fork_once", lambda: None)
    return tmp_path


def test_process_of_one_thread_can_be_forked(process: Path):
    assert find_obstacle() is None


def test_threads_are_an_obstacle(process: Path):
    (process / "task" / "2").mkdir()
    (process / "task" / "3").mkdir()
    assert find_obstacle() == "leaves threads, which a fork would not have: 2"


@pytest.mark.parametrize("device", ["/dev/nvidiactl", "/dev/kfd", "/dev/dri/renderD128", "/dev/accel0"])
def test_accelerator_is_an_obstacle(process: Path, device: str):
    (process / "fd" / "7").symlink_to(device)
    assert find_obstacle() == f"opens {device}, which works in no fork"


def test_module_that_cannot_be_imported_is_named():
    with pytest.raises(PreloadError, match=r"^no_such cannot be imported: Module.*MUSTER_PRELOAD$"):
        preload(["no_such"], ())


PRELOAD = """
import sys
from muster.preload.imports import preload, PreloadError
try:
    preload(sys.argv[1:], ["RANK", "LOCAL_RANK"])
except PreloadError as error:
    print(error)
"""


def preloaded(folder: Path, *modules: str) -> str:
    """Preload modules of a folder in a process of its own, and return what that says."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PRELOAD, *modules],
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert not done.stderr
    return done.stdout


def test_first_module_that_starts_a_thread_is_named(tmp_path: Path):
    (tmp_path / "quiet.py").write_text("")
    (tmp_path / "busy.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    assert preloaded(tmp_path, "quiet", "busy", "no_such") == (
        "the import of busy leaves threads, which a fork would not have: 1. Leave it out of MUSTER_PRELOAD\n"
    )


def test_threads_that_end_before_a_fork_are_no_obstacle(tmp_path: Path):
    """As those of OpenBLAS, which numpy starts if the environment does not say how many."""
    (tmp_path / "polite.py").write_text(
        "import os, threading\n"
        "end = threading.Event()\n"
        "thread = threading.Thread(target=end.wait)\n"
        "thread.start()\n"
        "def before():\n"
        "    end.set()\n"
        "    thread.join()\n"
        "os.register_at_fork(before=before)\n"
    )
    assert preloaded(tmp_path, "polite") == ""


@pytest.mark.parametrize(
    "reads", ["os.environ.get('LOCAL_RANK')", "os.getenv('LOCAL_RANK', '0')", "'LOCAL_RANK' in os.environ"]
)
def test_module_that_reads_a_variable_of_one_worker_is_named(tmp_path: Path, reads: str):
    """As lightning_fabric, which decides at its import which process is rank 0."""
    (tmp_path / "ranked.py").write_text(f"import os\n{reads}\nos.environ.get('HOME')\n")
    assert preloaded(tmp_path, "ranked") == (
        "the import of ranked reads LOCAL_RANK, which differs between workers. "
        "Leave it out of MUSTER_PRELOAD\n"
    )


def test_module_that_ends_the_process_is_named(tmp_path: Path):
    (tmp_path / "ends.py").write_text("raise SystemExit(3)\n")
    assert preloaded(tmp_path, "ends") == "ends cannot be imported: SystemExit(3). Correct MUSTER_PRELOAD\n"


def test_environment_is_plain_after_the_imports(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(imports, "find_obstacle", lambda: None)
    plain = type(os.environ)
    preload(["json"], ["HOME"])
    assert type(os.environ) is plain

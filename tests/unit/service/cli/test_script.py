"""The ``muster`` script where the packages of the coordinator are missing, and where they are not."""

import subprocess
import sys

import pytest

from lab.patience import PATIENCE

CALL = "from muster.service.cli.script import main; sys.argv = ['muster', '--version']; main()"


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", f"import sys; {program}"], capture_output=True, text=True, timeout=PATIENCE
    )


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_a_missing_package_is_a_sentence_that_says_what_to_install(package: str):
    done = run(f"sys.modules['{package}'] = None; {CALL}")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"Error: the muster command needs the coordinator's packages, and {package} is not installed\n"
        "  next: pip install 'muster-coordinator[service]'\n"
    )


def test_a_fault_of_its_own_is_shown_as_it_is():
    done = run(f"sys.modules['muster.service.cli.views.top'] = None; {CALL}")
    assert done.returncode == 1
    assert "Traceback" in done.stderr


def test_it_runs_the_command():
    done = run(CALL)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("muster ")

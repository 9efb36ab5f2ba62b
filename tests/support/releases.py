"""The last release, from its wheel in tests/releases, beside what is here now."""

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from lab.patience import PATIENCE
from lab.processes import fork_client
from lab.processes.coordinator import MUSTER, Coordinator

(WHEEL,) = (Path(__file__).parents[1] / "releases").glob("*.whl")
LAST = WHEEL.name.split("-")[1]
"""Its version."""
USER = Path(__file__).with_name("release_user.py")
TIMEOUT = 2 * PATIENCE
"""Seconds; two processes that import torch."""
_MUSTER = """
from importlib.metadata import distribution
distribution("muster-coordinator").entry_points["muster"].load()()
"""


@dataclass(frozen=True, slots=True)
class Installed:
    """A version that processes can be started of.

    Its packages are found before those that are installed here, and its metadata too, by which each side says
    its version.
    """

    site: Path | None = None
    """Where its wheel was unpacked; None for what is here now."""

    @property
    def environment(self) -> Mapping[str, str]:
        """The environment of a process of this version."""
        return {**os.environ, "PYTHONPATH": str(self.site)} if self.site else os.environ

    @property
    def program(self) -> tuple[str, ...]:
        """Its ``muster`` command."""
        return (sys.executable, "-c", _MUSTER) if self.site else (str(MUSTER),)

    def coordinator(self, folder: Path) -> Coordinator:
        """Its ``muster serve``, not started yet."""
        return Coordinator(folder, program=self.program, environment=self.environment)

    def muster(self, *arguments: str) -> str:
        """What its command prints; it must end well."""
        command = [*self.program, *arguments]
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=TIMEOUT, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def user(self, endpoint: str) -> subprocess.Popen[str]:
        """A node with one rank on its SDK; see ``release_user.py``."""
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        if self.site is None:
            return fork_client.popen([sys.executable, "-m", "tests.support.release_user", endpoint], **pipes)
        # -P: what stands beside the program is not to be imported.
        command = [sys.executable, "-P", str(USER), endpoint]
        return subprocess.Popen(command, env=self.environment, **pipes)


def unpack(folder: Path) -> Installed:
    """The last release, unpacked into a folder."""
    with ZipFile(WHEEL) as wheel:
        wheel.extractall(folder)
    return Installed(folder)

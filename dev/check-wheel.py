#!/usr/bin/env python3
"""Installs a wheel into clean environments, with each of its extras, and sees that what was asked for works.

The versions are those of requirements/torch.txt and dev.txt, which the tests run on.

Usage: dev/check-wheel.py WHEEL
"""

import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PINS = [ROOT / "requirements" / name for name in ("torch.txt", "dev.txt")]
EXAMPLE = ROOT / "examples/with_and_without_barrier.py"
"""Starts a coordinator, and processes that meet at its barriers."""
SERVICE_ONLY = ("aiohttp", "prometheus_client", "rich", "structlog", "typer", "uvloop")
"""Packages that the coordinator asks for, and neither the SDK nor torch."""
NO_COMMAND = (
    "Error: the muster command needs the coordinator's packages, and typer is not installed\n"
    "  next: pip install 'muster-coordinator[service]'\n"
)


class Environment:
    """A new virtual environment with the wheel in it."""

    def __init__(self, folder: Path, wheel: Path, extras: str) -> None:
        self.bin = folder / "bin"
        venv.create(folder, with_pip=True)
        wanted = f"muster-coordinator{extras} @ {wheel.resolve().as_uri()}"
        # Without the hashes: pip would ask for one of the wheel, too.
        pins = re.findall(r"^[\w.-]+==[^\s\\]+", "".join(one.read_text() for one in PINS), re.MULTILINE)
        constraints = folder / "constraints.txt"
        constraints.write_text("\n".join(pins))
        self.run("pip", "install", "--quiet", "--constraint", str(constraints), wanted)
        self.run("pip", "check")

    def run(self, program: str, *arguments: str) -> str:
        """What a program of the environment prints; it must end well."""
        done = self._ended(program, *arguments)
        if done.returncode:
            sys.exit(
                f"{program} {' '.join(arguments)} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
            )
        return done.stdout

    def expect(self, returncode: int, said: str, program: str, *arguments: str) -> None:
        """A program of the environment must end so, and say so on stderr."""
        done = self._ended(program, *arguments)
        if (done.returncode, done.stderr) != (returncode, said):
            sys.exit(
                f"{program} {' '.join(arguments)} ended with {done.returncode}, and said:\n{done.stderr}"
            )

    def python(self, program: str) -> str:
        """What a program in Python prints."""
        return self.run("python", "-c", program)

    def installed(self, *modules: str) -> list[str]:
        """Those of these modules that are there."""
        program = f"import importlib.util as u; print(*(m for m in {modules} if u.find_spec(m)))"
        return self.python(program).split()

    def _ended(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        return subprocess.run([self.bin / program, *arguments], capture_output=True, text=True, env=kept)


def main() -> None:
    """Check the wheel that is named."""
    wheel = Path(sys.argv[1])
    version = wheel.name.split("-")[1]
    checks = {
        "": check_protocol,
        "[service]": check_service,
        "[worker]": check_worker,
        "[service,worker]": check_both,
        "[service,watch,otel]": check_watch_and_traces,
    }
    for extras, check in checks.items():
        with tempfile.TemporaryDirectory(prefix="muster-") as folder:
            check(Environment(Path(folder), wheel, extras), version)
        print(f"muster-coordinator{extras} {version}: installed and works")


def check_protocol(environment: Environment, version: str) -> None:
    """Without an extra there is the protocol."""
    environment.python("import muster.v1.session_pb2_grpc, muster.v1.state_pb2")
    assert environment.installed("torch", *SERVICE_ONLY) == []
    environment.expect(2, NO_COMMAND, "muster", "--version")


def check_service(environment: Environment, version: str) -> None:
    """The coordinator, and no torch."""
    assert environment.run("muster", "--version") == f"muster {version}\n"
    environment.run("muster", "serve", "--help")
    environment.python("import muster.service.app")
    assert environment.installed("torch") == []


def check_worker(environment: Environment, version: str) -> None:
    """The SDK, and none of the coordinator's packages."""
    environment.python("import muster.worker, muster.worker.rendezvous, muster.worker.saves")
    assert environment.installed(*SERVICE_ONLY) == []
    environment.expect(2, NO_COMMAND, "muster", "--version")


def check_both(environment: Environment, version: str) -> None:
    """A coordinator, and a barrier on it."""
    assert environment.run("muster", "--version") == f"muster {version}\n"
    environment.run("python", str(EXAMPLE), "--barrier", "grpc")


def check_watch_and_traces(environment: Environment, version: str) -> None:
    """A watcher of Kubernetes, and an export of traces."""
    environment.run("muster", "watch", "--help")
    environment.python("import muster.watcher.sources.kubernetes")
    environment.python(
        "import os, sys; os.environ['OTEL_EXPORTER_OTLP_ENDPOINT'] = 'http://127.0.0.1:4317'; "
        "from muster.client.tracing import open_export; open_export('check', '1', sys.exit).close()"
    )
    assert environment.installed("torch") == []


if __name__ == "__main__":
    main()

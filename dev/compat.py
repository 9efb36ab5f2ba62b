"""Run the SDK's tests under other versions of torch, and the service's under other versions of Python.

Each version has a virtual environment of its own below ``.tools/compat``, which later runs use again. The
versions of all other packages are those of ``requirements/``. A table comes last: what ran, passed and
failed.

Usage: python -m dev.compat [NAME ...], such as ``torch-2.11 python-3.13``; default: all.
"""

import os
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ROOT / ".tools"
HOME = TOOLS / "compat"
REPORTS = ROOT / "build/compat"
PINS = [ROOT / "requirements" / name for name in ("dev.txt", "peers.txt")]

TORCH = {
    "torch-2.9": "2.9.1",
    "torch-2.10": "2.10.0",
    "torch-2.11": "2.11.0",
    "torch-2.12": "2.12.1",
    "torch-2.13": "2.13.0",
    "torch-2.14": "2.14.1",
    "torch-2.15": "2.15.0",
}
"""The last release of each minor version; PyPI's wheels are builds for CUDA, of several GB."""
PYTHON = {"python-3.12": None, "python-3.13": "trixie", "python-3.14": "forky"}
"""For each version of Python, the release of Debian that has it, for machines without it. None has 3.12."""
MIRROR = "http://deb.debian.org/debian"
ROOM = 12_000_000_000
"""Bytes that a version of torch may need on the disk, while it is installed."""
TEST_PACKAGES = (
    *("editables", "greenlet", "hatchling", "hypothesis", "numpy", "psutil", "PyYAML"),
    *("pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist"),
)
TORCH_PACKAGES = ("fsspec", "safetensors")
OPTIONS = (
    *("-q", "-n", "2", "-p", "no:cacheprovider"),
    # No time limits: other work runs on this machine meanwhile.
    "--hypothesis-profile=ci",
    # Some versions of torch warn of their own code: 2.9 of its file writer, 2.11 and 2.15 of their loads.
    "-W=ignore:TypedStorage is deprecated:UserWarning",
    "-W=ignore:Sparse invariant checks are implicitly disabled:UserWarning",
    "-W=ignore:Validating sparse tensor invariants:UserWarning",
)
"""Options of pytest."""

FRAMEWORK_TESTS = tuple(
    f"tests/unit/worker/integrations/{name}"
    for name in (
        *("deepspeed", "lightning"),
        *("test_accelerate.py", "test_orbax.py", "test_torchtitan.py", "test_transformers.py"),
    )
)
"""The SDK's tests that need a framework. The other tests of adapters need torch alone."""
SDK_TESTS = (
    *("tests/unit/checkpoint", "tests/unit/worker"),
    *(f"--ignore={tests}" for tests in FRAMEWORK_TESTS),
    "--deselect=tests/integration/sdk/test_import.py::test_what_needs_no_torch",
    *(
        f"tests/integration/{name}.py"
        for name in (
            "frameworks/test_dcp",
            "rendezvous/test_rendezvous_handler",
            "saves/test_saves",
            "sdk/test_import",
            "sdk/test_sdk_session",
            "sdk/test_store",
        )
    ),
)
"""Saves, loads, barriers, the store and the rendezvous."""
SERVICE_TESTS = (
    *(
        "tests/contract",
        "tests/unit/checkpoint",
        "tests/unit/client",
        "tests/unit/relay",
        "tests/unit/service",
    ),
    "tests/unit/worker",
    # They need torch.
    "--ignore=tests/contract/test_objects.py",
    "--ignore=tests/unit/service/core/test_store.py",
    *(
        f"--ignore=tests/unit/worker/{name}"
        for name in (
            *("integrations", "saves", "insight/test_saves.py", "savepoint/test_point.py"),
            *("node/test_membership.py", "test_checkpointing.py", "test_errors.py"),
            *("test_fallback_barriers.py", "test_init.py", "test_rendezvous.py"),
            *("test_rendezvous_stopped.py", "test_sockets.py"),
            *("test_steps.py", "test_store.py", "transport/test_unary.py"),
        )
    ),
)
"""The service, the relay, the client and the torch-free SDK."""


class NotRunError(Exception):
    """A version could not be set up; the message says why."""


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one version's tests."""

    name: str
    version: str
    passed: int = 0
    failed: int = 0
    seconds: float = 0.0
    why: str = ""
    """Why nothing ran, or what the log has; empty: all passed."""


def main(names: Sequence[str]) -> int:
    """Run the versions that are named, and show the table.

    Args:
        names: keys of ``TORCH`` and ``PYTHON``; none: all of them.

    Returns:
        The exit code: 0 if all tests of all versions passed.
    """
    known = [*TORCH, *PYTHON]
    if wrong := [name for name in names if name not in known]:
        sys.exit(f"{', '.join(wrong)}: not known. Choose from {' '.join(known)}.")
    results = [_run(name) for name in names or known]
    print()
    for result in results:
        print(
            f"{result.name:12} {result.version:24} {result.passed:5} passed {result.failed:3} failed "
            f"{result.seconds:5.0f} s  {result.why}"
        )
    return int(any(result.why for result in results))


def _run(name: str) -> Result:
    print(f"== {name}", flush=True)
    try:
        if name in TORCH:
            return _test(name, [_torch(name, TORCH[name])], "torch.__version__", SDK_TESTS)
        return _test(name, _python(name, PYTHON[name]), "platform.python_version()", SERVICE_TESTS)
    except (NotRunError, OSError) as error:
        return Result(name, "", why=f"not run: {error}")
    except subprocess.CalledProcessError as error:
        return Result(name, "", why=f"not run: a step to set it up ended with {error.returncode}, see above")


def _test(name: str, python: list[str], version: str, tests: Sequence[str]) -> Result:
    """Run tests by an environment's Python.

    Args:
        name: of the version.
        python: the command.
        version: the expression that says which version it is.
        tests: arguments of pytest.
    """
    REPORTS.mkdir(parents=True, exist_ok=True)
    report, log = REPORTS / f"{name}.xml", REPORTS / f"{name}.log"
    report.unlink(missing_ok=True)
    # Each time: what it depends on may have changed.
    _install(python, "--no-build-isolation", "--editable", ".[service]")
    module = version.partition(".")[0]
    found = _output([*python, "-c", f"import {module}; print({version})"]).split()[-1]
    began = time.monotonic()
    with log.open("w") as output:
        subprocess.run(
            ["nice", *python, "-m", "pytest", *OPTIONS, f"--junitxml={report}", *tests],
            cwd=ROOT,
            env=_environ(),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    seconds = time.monotonic() - began
    if not report.exists():
        return Result(name, found, seconds=seconds, why=f"not run: see {log.relative_to(ROOT)}")
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = sum(case.find("failure") is not None or case.find("error") is not None for case in cases)
    skipped = sum(case.find("skipped") is not None for case in cases)
    why = f"see {log.relative_to(ROOT)}" if failed or not cases else ""
    return Result(name, found, len(cases) - failed - skipped, failed, seconds, why)


# ---------------------------------------------------------------------- torch


def _torch(name: str, version: str) -> str:
    """The Python of a virtual environment that has this version of torch."""
    home = HOME / name
    python = str(home / "bin/python")
    if not _is_set_up(home, version):
        _make_room(home)
        shutil.rmtree(home, ignore_errors=True)
        _call([sys.executable, "-m", "venv", str(home)])
        _install([python], f"torch=={version}", *TEST_PACKAGES, *TORCH_PACKAGES)
        # It names torch 2.10 as its oldest; Muster's support of it is to work with 2.9, too.
        _install([python], "--no-deps", "torch_checkpointing")
        (home / ".set-up").write_text(_stamp(version))
    return python


def _make_room(home: Path) -> None:
    """Remove other versions of torch while the disk has too little room for one more."""
    HOME.mkdir(parents=True, exist_ok=True)
    for other in sorted(HOME.glob("torch-*")):
        if shutil.disk_usage(HOME).free >= ROOM:
            return
        if other != home:
            shutil.rmtree(other)
    if shutil.disk_usage(HOME).free < ROOM:
        raise NotRunError(f"{HOME} has less than {ROOM / 1e9:g} GB of room")


# ---------------------------------------------------------------------- Python


def _python(name: str, release: str | None) -> list[str]:
    """The command of an environment with this version of Python, and without torch."""
    version = name.removeprefix("python-")
    interpreter = next(_interpreters(version), None)
    enter: list[str] = []
    if interpreter is None:
        if release is None:
            raise NotRunError(f"python{version} is not installed, and no release of Debian has it")
        interpreter, enter = "/usr/bin/python3", _debian(release)
    home = HOME / name
    python = [*enter, str(home / "bin/python")]
    if not _is_set_up(home, interpreter):
        shutil.rmtree(home, ignore_errors=True)
        _call([*enter, interpreter, "-m", "venv", str(home)])
        _install(python, *TEST_PACKAGES)
        (home / ".set-up").write_text(_stamp(interpreter))
    if (found := _output([*python, "-c", "import sys; print(*sys.version_info[:2], sep='.')"])) != version:
        raise NotRunError(f"{' '.join(python)} is Python {found}")
    return python


def _interpreters(version: str) -> Iterator[str]:
    """Yield the interpreters of this machine that run: on the path, or below pyenv's folder."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    on_path = shutil.which(f"python{version}")
    for found in ([on_path] if on_path else []) + sorted(
        map(str, pyenv.glob(f"versions/{version}.*/bin/python{version}"))
    ):
        if subprocess.run([found, "-c", ""], capture_output=True).returncode == 0:
            yield found


ENTER = """
root=$1; folder=$2; shift 2
PATH=$PATH:/usr/sbin  # of chroot
certificates=/etc/ssl/certs/ca-certificates.crt
for what in /proc /dev /sys /etc/resolv.conf $certificates "$folder" "$(realpath .tools)"; do
    if [ -d "$what" ]; then mkdir -p "$root$what"; else touch "$root$what"; fi
    mount --rbind "$what" "$root$what"
done
exec chroot "$root" env -C "$folder" "$@"
"""
"""Runs a command in another root, where this repository has the same path; the mounts end with it."""


def _debian(release: str) -> list[str]:
    """Return the prefix of a command that runs in a release of Debian, which is fetched if need be."""
    if os.geteuid() != 0:
        raise NotRunError(f"it is not installed, and only root can use that of Debian {release}")
    root = HOME / f"debian-{release}"
    if not (root / ".fetched").exists():
        _call(["dev/fetch-debian.sh", "debootstrap"])
        shutil.rmtree(root, ignore_errors=True)
        share = TOOLS / "debootstrap/usr/share/debootstrap"
        packages = "python3,python3-venv,python3-pip,ca-certificates"
        # Debian 12's debootstrap does not know the newest names; the steps are sid's.
        _call(
            [
                *("env", f"DEBOOTSTRAP_DIR={share}", str(TOOLS / "debootstrap/usr/sbin/debootstrap")),
                *("--variant=minbase", f"--include={packages}", release, str(root), MIRROR),
                str(share / "scripts/sid"),
            ]
        )
        (root / ".fetched").touch()
    return ["unshare", "--mount", "sh", "-ec", ENTER, "sh", str(root), str(ROOT)]


# ---------------------------------------------------------------------- both


def _stamp(version: str) -> str:
    return "\n".join([version, *TEST_PACKAGES, *TORCH_PACKAGES, *_pins()])


def _pins() -> list[str]:
    """Return the pins of packages. Constraints have no hashes: pip would ask for one of every package.

    setuptools is not among them: torch 2.12 asks for an older one, and no test depends on it.
    """
    pins = re.findall(r"^[\w.-]+==[^\s\\]+", "".join(one.read_text() for one in PINS), re.MULTILINE)
    return [pin for pin in pins if not pin.startswith("setuptools==")]


def _is_set_up(home: Path, version: str) -> bool:
    stamp = home / ".set-up"
    return stamp.exists() and stamp.read_text() == _stamp(version)


def _environ() -> dict[str, str]:
    """Return the commands' environment: without our settings for Python, and with our pins of packages."""
    HOME.mkdir(parents=True, exist_ok=True)
    constraints = HOME / "constraints.txt"
    constraints.write_text("\n".join([*_pins(), ""]))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return kept | {"PIP_CONSTRAINT": str(constraints), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def _install(python: Sequence[str], *wanted: str) -> None:
    _call([*python, "-m", "pip", "install", "--quiet", "--progress-bar=off", *wanted])


def _call(command: Sequence[str]) -> None:
    subprocess.run(command, cwd=ROOT, env=_environ(), check=True)


def _output(command: Sequence[str]) -> str:
    return subprocess.run(
        command, cwd=ROOT, env=_environ(), check=True, stdout=subprocess.PIPE, text=True
    ).stdout.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The systemd units: what they start, and what it may not do."""

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from muster.service.cli.main import app

FOLDER = Path(__file__).resolve().parents[3] / "deploy" / "systemd"
UNIT = FOLDER / "muster.service"
WATCHER = FOLDER / "muster-watch.service"
SANDBOX = {
    "CapabilityBoundingSet": "",
    "AmbientCapabilities": "",
    "NoNewPrivileges": "yes",
    "ProtectSystem": "strict",
    "ProtectHome": "yes",
    "PrivateTmp": "yes",
    "PrivateDevices": "yes",
    "ProtectKernelModules": "yes",
    "ProtectKernelTunables": "yes",
    "ProtectControlGroups": "yes",
    "RestrictNamespaces": "yes",
    "RestrictSUIDSGID": "yes",
    "MemoryDenyWriteExecute": "yes",
    "SystemCallArchitectures": "native",
}
"""The least that a unit must set. systemd-analyze judges the whole, where it is installed."""
MAX_EXPOSURE = 15
"""Of ``systemd-analyze security``, in tenths: 1.5 of 10."""


def options(unit: Path) -> dict[str, list[str]]:
    """Return what a unit sets; an option may be set several times."""
    found: dict[str, list[str]] = {}
    for line in unit.read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


@pytest.mark.parametrize("unit", [UNIT, WATCHER], ids=lambda unit: unit.name)
def test_unit_is_sandboxed(unit: Path):
    assert SANDBOX.items() <= {name: values[-1] for name, values in options(unit).items()}.items()


def test_unit_serves_by_its_configuration_and_always_restarts():
    (start,) = options(UNIT)["ExecStart"]
    assert shlex.split(start)[1:] == ["serve", "--config", "/etc/muster/muster.toml"]
    shown = CliRunner().invoke(app, ["config", "--config", str(FOLDER / "muster.toml"), "--output=json"])
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.output)
    assert found["insecure"]["value"] is False
    assert options(UNIT)["Restart"] == ["always"]
    assert int(options(UNIT)["TimeoutStopSec"][0]) > found["drain_grace"]["value"]
    # systemd makes the folder, and lets the service write there alone.
    assert options(UNIT)["StateDirectory"] == ["muster"]
    assert found["state"]["value"].startswith("sqlite:////var/lib/muster/")


def test_watcher_takes_its_settings_from_a_file_and_always_restarts():
    (start,) = options(WATCHER)["ExecStart"]
    assert shlex.split(start)[1:] == ["watch"]
    (file,) = options(WATCHER)["EnvironmentFile"]
    assert Path(file).parent == Path("/etc/muster")
    assert options(WATCHER)["Restart"] == ["always"]


@pytest.mark.parametrize("unit", [UNIT, WATCHER], ids=lambda unit: unit.name)
def test_systemd_accepts_the_unit_and_calls_its_exposure_low(unit: Path, tmp_path: Path):
    analyze = shutil.which("systemd-analyze")
    if analyze is None:  # The tests above say the most important of it.
        return
    copy = tmp_path / unit.name
    copy.write_text(unit.read_text().replace("/opt/muster/bin/muster", sys.executable))
    for arguments in (["verify"], ["security", "--offline=true", f"--threshold={MAX_EXPOSURE}"]):
        done = subprocess.run(
            [analyze, *arguments, str(copy)], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stderr == ""

"""What `make lint` asks of a change of the protos: that a peer of the last release still understands it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lab.patience import PATIENCE
from tests.support.releases import WHEEL

PROTOS = Path(__file__).resolve().parents[3] / "proto"
BUF = Path(sys.executable).with_name("buf")


def breaking(protos: Path) -> subprocess.CompletedProcess[str]:
    command = [str(BUF), "breaking", "--against", f"{WHEEL}#format=zip"]
    return subprocess.run(command, cwd=protos, capture_output=True, text=True, timeout=PATIENCE)


@pytest.fixture
def protos(tmp_path: Path) -> Path:
    return Path(shutil.copytree(PROTOS, tmp_path / "proto", ignore=shutil.ignore_patterns("*.py", "*.pyi")))


@pytest.mark.parametrize(
    ("file", "before", "after", "said"),
    [
        pytest.param(
            "session", "uint32 protocol_version = 5", "uint32 protocol_version = 60", '"5"', id="number"
        ),
        pytest.param("session", "bytes payload = 2", "string payload = 2", '"payload"', id="type"),
        pytest.param("common", "OUTCOME_ABORTED = 3", "OUTCOME_ABORTED = 9", '"3"', id="value of an enum"),
        pytest.param(
            "state", "message GroupRecord", "message Flock", "GroupRecord", id="record of the state"
        ),
    ],
)
def test_change_that_breaks_peers_or_stored_state_is_found(
    protos: Path, file: str, before: str, after: str, said: str
):
    path = protos / f"muster/v1/{file}.proto"
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))
    done = breaking(protos)
    assert done.returncode != 0
    assert said in done.stdout


def test_added_message_is_not_a_breaking_change(protos: Path):
    path = protos / "muster/v1/session.proto"
    path.write_text(path.read_text() + "\n// New is new.\nmessage New {}\n")
    done = breaking(protos)
    assert (done.returncode, done.stdout) == (0, "")

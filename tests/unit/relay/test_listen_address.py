"""Where a relay listens, and where it refuses to."""

import os
import socket
from pathlib import Path

import pytest

from muster.relay.listen_address import ListenError, parse_listen_address


def unix(path: Path) -> str:
    return f"unix://{path}"


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short one, for the relay's user alone."""
    folder = tmp_path_factory.mktemp("s")
    folder.chmod(0o700)
    return folder


@pytest.mark.parametrize(
    "given",
    ["", "here", "unix:", "unix:///", "unix://relative.sock", "host", "host:port", "host:0", "a:1,b:1"],
)
def test_text_that_is_no_address_is_refused(given: str):
    with pytest.raises(ListenError):
        parse_listen_address(given)


def test_path_too_long_for_a_socket_is_refused_with_its_limit():
    with pytest.raises(ListenError, match="107"):
        parse_listen_address(f"unix:///{'x' * 107}")


def test_free_path_in_own_folder_is_accepted(folder: Path):
    listen = parse_listen_address(unix(folder / "relay.sock"))
    listen.prepare()
    assert listen.path == folder / "relay.sock"


def test_folder_that_others_may_write_is_refused(folder: Path):
    folder.chmod(0o777)
    with pytest.raises(ListenError, match="others may write its folder"):
        parse_listen_address(unix(folder / "relay.sock")).prepare()


def test_missing_folder_is_made_without_write_access_for_others(folder: Path):
    folder.chmod(0o777)  # As a pod's volume is.
    parse_listen_address(unix(folder / "own" / "relay.sock")).prepare()
    assert not (folder / "own").stat().st_mode & 0o022


def test_folder_that_cannot_be_made_is_named(folder: Path):
    with pytest.raises(ListenError, match="nowhere/at/all, cannot be looked at"):
        parse_listen_address(unix(folder / "nowhere/at/all/relay.sock")).prepare()


def test_file_in_place_of_the_folder_is_refused(folder: Path):
    (folder / "file").touch()
    with pytest.raises(ListenError):
        parse_listen_address(unix(folder / "file" / "relay.sock")).prepare()


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_file_that_is_no_socket_is_left_alone(folder: Path, kind: str):
    path = folder / "relay.sock"
    if kind == "file":
        path.write_text("important")
    else:
        path.mkdir()
    with pytest.raises(ListenError, match="something that is no socket"):
        parse_listen_address(unix(path)).prepare()
    assert path.exists()


def test_socket_in_use_is_left_alone(folder: Path):
    path = folder / "relay.sock"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(os.fspath(path))
        other.listen()
        with pytest.raises(ListenError, match="somebody listens there"):
            parse_listen_address(unix(path)).prepare()
        assert path.exists()


def test_socket_of_a_dead_relay_is_removed(folder: Path):
    path = folder / "relay.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(os.fspath(path))
    parse_listen_address(unix(path)).prepare()
    assert not path.exists()

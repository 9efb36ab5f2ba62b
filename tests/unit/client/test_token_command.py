"""Tokens from a helper command: kept while they are good, and nothing of them in a message."""

import threading
from pathlib import Path

import pytest

from muster.client import token_command
from muster.client.token_command import KEPT, MARGIN, CommandError, TokenCommands, expiry
from tests.support.issuer import Issuer

NOW = 1_700_000_000.0


class Helper:
    """A command that counts how often it ran, and writes a file."""

    def __init__(self, folder: Path) -> None:
        self.says, self._ran = folder / "says", folder / "ran"
        self._ran.touch()
        script = folder / "helper"
        script.write_text(f"echo >> '{self._ran}'; cat '{self.says}'; echo chatter >&2")
        self.command = f"sh '{script}' 'two words'"

    @property
    def ran(self) -> int:
        return self._ran.read_text().count("\n")


@pytest.fixture
def helper(tmp_path: Path) -> Helper:
    return Helper(tmp_path)


def test_token_is_kept_until_shortly_before_its_expiry(helper: Helper):
    now = NOW
    commands = TokenCommands(lambda: now)
    first, second = Issuer().token(now=NOW, seconds=600), Issuer().token(now=NOW, seconds=1_200)
    helper.says.write_text(f"\n{first}\n")
    assert commands.token(helper.command) == first
    helper.says.write_text(second)
    now = NOW + 600 - MARGIN - 1
    assert (commands.token(helper.command), helper.ran) == (first, 1)
    now += 1
    assert (commands.token(helper.command), helper.ran) == (second, 2)


def test_token_without_an_expiry_is_kept_for_a_while(helper: Helper):
    now = NOW
    commands = TokenCommands(lambda: now)
    for count in (1, 2):
        helper.says.write_text(f"token-{count}")
        for _ in range(2):
            assert (commands.token(helper.command), helper.ran) == (f"token-{count}", count)
        now += KEPT


def test_command_runs_again_after_its_token_was_refused(helper: Helper):
    commands = TokenCommands()
    helper.says.write_text("one")
    commands.token(helper.command)
    helper.says.write_text("two")
    commands.forget(helper.command)
    commands.forget("never ran")
    assert commands.token(helper.command) == "two"


def test_concurrent_callers_share_one_run_of_the_command(helper: Helper):
    commands = TokenCommands()
    helper.says.write_text("one")
    threads = [threading.Thread(target=commands.token, args=(helper.command,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert helper.ran == 1


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("sh -c 'echo s3cr3t; exit 3'", "sh ended with 3; what it said is on stderr"),
        ("/nowhere/helper s3cr3t", "/nowhere/helper cannot be run .No such file"),
        ("helper 's3cr3t", "cannot be read as words .No closing quotation"),
        (" ", "it has no words"),
        ("sleep 60", "sleep did not end within 0.05 s"),
    ],
)
def test_command_without_a_token_is_named(monkeypatch: pytest.MonkeyPatch, command: str, why: str):
    if command.startswith("sleep"):
        monkeypatch.setattr(token_command, "TIMEOUT", 0.05)
    with pytest.raises(CommandError, match=why) as caught:
        TokenCommands().token(command)
    assert "s3cr3t" not in str(caught.value)


@pytest.mark.parametrize(
    "token", ["", "static", "a.b.c", "e30.e30.e30", "e30.W10.x", "a.eyJleHAiOiBudWxsfQ.c"]
)
def test_text_without_an_expiry_has_none(token: str):
    assert expiry(token) is None

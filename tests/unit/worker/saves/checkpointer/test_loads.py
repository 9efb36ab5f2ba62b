"""A load verifies what it reads, and a resume steps down from damaged checkpoints."""

import errno
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from muster.checkpoint import retry
from muster.worker.saves import Checkpointer, CorruptCheckpointError
from tests.support.saves.fake_barrier import FakeBarrier
from tests.unit.worker.saves.checkpointer.states import hurt, loaded, save_steps, state


def test_resume_returns_none_without_a_checkpoint(made: Checkpointer):
    assert made.resume(state(0)) is None


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "manifest.json", "committed.json"])
@pytest.mark.parametrize("how", ["flipped", "truncated", "missing"])
def test_resume_steps_down_from_a_damaged_checkpoint_for_good(
    made: Checkpointer, tmp_path: Path, barrier: FakeBarrier, name: str, how: str
):
    save_steps(made, 1, 2, 3)
    hurt(tmp_path / "step-0000000003" / name, how)
    into = state(-7)
    found = made.resume(into)
    assert found is not None
    assert (found.step, into["step"]) == (2, 2.0)
    assert torch.equal(into["model"]["weight"], torch.full((1000,), 2.0))
    # The next generation does not look at it again, and can save the step again.
    latest = made.latest()
    assert latest is not None
    assert latest.step == 2
    made.save(3, state(3.5))
    assert made.finalize(blocking=True) == [3]
    assert loaded(made) == (3, 3.5)


def test_resume_raises_if_every_checkpoint_is_damaged(made: Checkpointer, tmp_path: Path):
    save_steps(made, 1, 2)
    for step in (1, 2):
        hurt(tmp_path / f"step-{step:010}" / "__0_0.distcp", "flipped")
    for _ in range(2):  # Also when all are marked.
        with pytest.raises(
            CorruptCheckpointError, match=r"step-0000000002: __0_0.distcp at offset \d+: .* bytes"
        ):
            made.resume(state(0))


def test_partial_load_does_not_mix_two_checkpoints(made: Checkpointer, tmp_path: Path):
    """What the older checkpoint does not have would stay as the damaged one had it."""
    save_steps(made, 1)
    made.save(2, state(2) | {"more": torch.ones(3)})
    assert made.finalize(blocking=True) == [2]
    hurt(tmp_path / "step-0000000002" / "__0_0.distcp", "flipped")
    planner = DefaultLoadPlanner(allow_partial_load=True)
    with pytest.raises(CorruptCheckpointError, match="Build the state again, and call resume"):
        made.resume(state(0) | {"more": torch.zeros(3)}, planner=planner)
    into = state(0) | {"more": torch.zeros(3)}
    found = made.resume(into, planner=planner)
    assert found is not None
    assert (found.step, into["more"].sum()) == (1, 0)


def test_load_of_a_named_checkpoint_does_not_step_down(made: Checkpointer, tmp_path: Path):
    save_steps(made, 1, 2)
    path = tmp_path / "step-0000000002"
    hurt(path / "__0_0.distcp", "flipped")
    for _ in range(2):
        with pytest.raises(CorruptCheckpointError, match=r"__0_0.distcp at offset"):
            made.load(state(0), path)
    assert loaded(made) == (1, 1)


def test_verify_off_loads_what_is_there(tmp_path: Path, barrier: FakeBarrier):
    made = Checkpointer(tmp_path, verify="off", barrier=barrier)  # type: ignore[arg-type]
    save_steps(made, 1)
    hurt(tmp_path / "step-0000000001" / "manifest.json", "missing")
    assert loaded(made) == (1, 1)
    made.close()


def test_verify_of_another_value_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="verify = 'on'"):
        Checkpointer(tmp_path, verify="on", barrier=FakeBarrier())  # type: ignore[arg-type]


def test_checkpoint_without_digests_loads_with_a_warning(
    made: Checkpointer, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """As 0.1.0 wrote them."""
    save_steps(made, 1)
    folder = tmp_path / "step-0000000001"
    (folder / "manifest.json").unlink()
    fields = {"step": 1, "world_size": 1, "run_id": "job", "prefix": "save", "sequence": 0}
    (folder / "committed.json").write_text(json.dumps(fields))
    assert loaded(made) == (1, 1)
    assert "it is loaded unverified" in caplog.text
    save_steps(made, 2)
    assert loaded(made) == (2, 2)


def test_first_read_that_fails_on_its_way_is_no_damage(
    made: Checkpointer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    save_steps(made, 1)
    preadv = os.preadv
    reads: list[int] = []

    def once_wrong(handle: int, buffers: list[memoryview], offset: int) -> int:
        count = preadv(handle, buffers, offset)
        reads.append(count)
        if len(reads) == 1:
            buffers[0][0] ^= 1
        return count

    monkeypatch.setattr(os, "preadv", once_wrong)
    assert loaded(made) == (1, 1)
    assert not list(tmp_path.glob("*/.damaged.json"))


@pytest.mark.parametrize("error", [errno.EIO, errno.ESTALE, errno.EACCES])
@pytest.mark.parametrize("where", ["the marker", "the listing", "an item"])
def test_io_error_is_raised_and_never_taken_for_absence(
    made: Checkpointer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int, where: str
):
    save_steps(made, 1, 2)
    monkeypatch.setattr(retry, "DELAYS", (0.0,))
    fault = OSError(error, os.strerror(error))

    def failing(owner: Any, name: str, concerns: Callable[..., bool]) -> None:
        real = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            if concerns(*arguments):
                raise fault
            return real(*arguments, **options)

        monkeypatch.setattr(owner, name, call)

    if where == "the marker":
        failing(Path, "read_bytes", lambda path: path == tmp_path / "step-0000000002" / "committed.json")
    elif where == "the listing":
        failing(Path, "iterdir", lambda path: path == tmp_path)
    else:
        failing(os, "preadv", lambda *_: True)
    with pytest.raises((OSError, RuntimeError), match=re.escape(os.strerror(error))):
        made.resume(state(0))
    assert not list(tmp_path.glob("*/.damaged.json"))


def test_loading_nothing_says_so(made: Checkpointer):
    with pytest.raises(FileNotFoundError, match="holds no committed checkpoint"):
        made.load(state(0))

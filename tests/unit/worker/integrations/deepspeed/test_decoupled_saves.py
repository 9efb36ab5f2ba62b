"""A save by a decoupled writer of DeepSpeed is committed when the writer has ended."""

import logging
from pathlib import Path
from typing import Any

import pytest

from muster.worker.errors import BarrierAbortedError
from muster.worker.integrations.commit import commitment
from tests.unit.worker.integrations.commit.folder_jobs import names
from tests.unit.worker.integrations.deepspeed.engines import content, full, latest


def test_a_decoupled_save_is_committed_before_the_next_step(tmp_path: Path, decoupled: Any):
    decoupled.save_checkpoint(tmp_path, "one")
    assert names(tmp_path) == {".one.0-0-fbd8e0f8"}
    decoupled._commit_decoupled_checkpoint()
    assert names(tmp_path) == {"one", "latest"}
    decoupled._commit_decoupled_checkpoint()
    assert decoupled.committed == 3, "at the save, at the step, and at the next one"


def test_a_decoupled_save_is_committed_before_another_one_a_load_and_the_end(tmp_path: Path, decoupled: Any):
    for tag in ("one", "two", "three"):
        decoupled.save_checkpoint(tmp_path, tag)
    assert latest(tmp_path) == "two"
    assert content(decoupled, tmp_path) == "{}"
    assert latest(tmp_path) == "three"
    decoupled.save_checkpoint(tmp_path, "four")
    decoupled.destroy()
    assert latest(tmp_path) == "four"
    assert decoupled.destroyed == 1
    assert names(tmp_path) == {"one", "two", "three", "four", "latest"}


def test_a_decoupled_writer_that_fails_is_everyones_error(tmp_path: Path, decoupled: Any):
    decoupled.save_checkpoint(tmp_path, "one")
    decoupled._commit_decoupled_checkpoint()
    decoupled.save_checkpoint(tmp_path, "two")
    decoupled.crash = RuntimeError("checkpoint process is not running")
    with pytest.raises(BarrierAbortedError, match="process is not running"):
        decoupled._commit_decoupled_checkpoint()
    assert latest(tmp_path) == "one"
    with pytest.raises(RuntimeError, match="process is not running"):
        decoupled.destroy()
    assert decoupled.destroyed == 1


def test_a_decoupled_save_that_a_rank_cannot_begin_is_its_error_again_where_the_others_hear_of_it(
    tmp_path: Path, decoupled: Any
):
    decoupled.checkpoint_engine.fault = full()
    with pytest.raises(BarrierAbortedError, match="No space left"):
        decoupled.save_checkpoint(tmp_path)
    decoupled.checkpoint_engine.fault = None
    with pytest.raises(BarrierAbortedError, match="No space left"):
        decoupled._commit_decoupled_checkpoint()
    decoupled.save_checkpoint(tmp_path)
    decoupled.destroy()
    assert names(tmp_path) == {"global_step7", "latest"}


def test_an_engine_that_is_destroyed_in_an_exception_waits_for_nobody(
    tmp_path: Path, decoupled: Any, caplog: pytest.LogCaptureFixture
):
    decoupled.save_checkpoint(tmp_path, "one")
    with pytest.raises(KeyError):
        try:
            raise KeyError("a batch")
        finally:
            decoupled.destroy()
    assert (decoupled.destroyed, decoupled.committed) == (1, 1)
    with caplog.at_level(logging.ERROR):
        next(iter(commitment._last.values())).join(5.0)
    assert "was given up" in caplog.text
    assert names(tmp_path) == {".one.0-0-fbd8e0f8"}

"""What ``muster checkpoint`` says of a place that is not there."""

import pytest

from muster.service.cli.failure import Exit
from tests.unit.service.cli.test_main import invoke


@pytest.mark.parametrize("verb", ["list", "describe", "verify"])
def test_word_that_may_be_a_run_is_led_to_the_local_checkpoints_of_runs(verb: str):
    word, path = (invoke("checkpoint", verb, place) for place in ("job1", "./job1"))
    assert (word.exit_code, path.exit_code) == (Exit.FAILED, Exit.FAILED)
    assert "If it is a run, see its local checkpoints: muster get checkpoints job1" in word.stderr
    assert "get checkpoints" not in path.stderr

"""Exceptions that existing handlers catch, and that survive the way between processes."""

import copy
import pickle

import pytest
from torch.distributed import DistStoreError

from muster.worker import errors
from muster.worker.decision import Decision, Failure, MissingRank, MissingState, Outcome

MISSING = [MissingRank(3, "node-0", 4121, MissingState.CONNECTION_LOST, 41.5, 6)]
FAILED = (Failure(1, "node-1", 4122, "OSError: no space left on device"),)
BARRIER_ERRORS = {
    Outcome.TIMED_OUT: errors.BarrierTimeoutError,
    Outcome.ABORTED: errors.BarrierAbortedError,
    Outcome.MEMBER_LOST: errors.MemberLostError,
    Outcome.MISMATCHED: errors.BarrierMismatchError,
    Outcome.UNKNOWN: errors.OutcomeUnknownError,
}
ALL = [
    errors.MusterError("closed."),
    errors.ConnectError("no answer."),
    errors.RefusedError("a newer one runs.", "STALE_GENERATION"),
    errors.StoreTimeoutError("nobody set it.", ["a", "b"]),
    errors.BarrierError("failed", "checkpoint", 7, Outcome.ABORTED),
    errors.AsyncSaveError("why", 2, Decision("save", 7, Outcome.ABORTED, "why", tuple(MISSING), FAILED)),
    *(kind("why", "checkpoint", 7, outcome, MISSING) for outcome, kind in BARRIER_ERRORS.items()),
]
FIELDS = ("prefix", "sequence", "outcome", "missing", "reason", "keys", "call_idx", "decision", "failures")


def fields(error: Exception) -> dict[str, object]:
    return {name: getattr(error, name) for name in FIELDS if hasattr(error, name)}


def test_each_error_of_the_sdk_is_covered_here():
    kinds = {
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.MusterError)
    }
    assert {type(error) for error in ALL} == kinds


@pytest.mark.parametrize("error", ALL, ids=lambda error: type(error).__name__)
def test_error_is_caught_by_handlers_of_store_errors(error: Exception):
    assert isinstance(error, DistStoreError)
    assert isinstance(error, RuntimeError)
    with pytest.raises(DistStoreError, match=str(error)):
        raise error


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("error", ALL, ids=lambda error: type(error).__name__)
def test_error_survives_pickling(error: Exception, protocol: int):
    back = pickle.loads(pickle.dumps(error, protocol))
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert fields(back) == fields(error)


@pytest.mark.parametrize("error", ALL, ids=lambda error: type(error).__name__)
def test_error_can_be_copied(error: Exception):
    assert fields(copy.deepcopy(error)) == fields(copy.copy(error)) == fields(error)


@pytest.mark.parametrize("error", ALL, ids=lambda error: type(error).__name__)
def test_notes_and_added_attributes_survive_pickling(error: Exception):
    noted = copy.copy(error)
    noted.add_note("while saving step 12000")
    assert pickle.loads(pickle.dumps(noted)).__notes__ == ["while saving step 12000"]


@pytest.mark.parametrize(
    "outcome", [outcome for outcome in Outcome if outcome not in (Outcome.RELEASED, Outcome.UNKNOWN)]
)
def test_error_for_a_decision_has_its_details(outcome: Outcome):
    decision = Decision("checkpoint", 7, outcome, "what happened", tuple(MISSING))
    error = errors.error_for(decision)
    assert type(error) is BARRIER_ERRORS[outcome]
    assert str(error) == "what happened"
    assert fields(error) == {"prefix": "checkpoint", "sequence": 7, "outcome": outcome, "missing": MISSING}


def test_error_has_its_own_list_of_missing_ranks():
    error = errors.error_for(Decision("checkpoint", 7, Outcome.TIMED_OUT, "", tuple(MISSING)))
    error.missing.clear()
    assert errors.BarrierError("", "p", 0, Outcome.ABORTED).missing == []


def test_refusal_may_have_no_reason():
    assert errors.RefusedError("no.").reason == ""


def test_save_error_names_failed_and_missing_ranks():
    decision = Decision("save", 7, Outcome.ABORTED, "why", tuple(MISSING), FAILED)
    error = errors.AsyncSaveError("why", 2, decision)
    assert (error.failures, error.missing) == (FAILED, tuple(MISSING))

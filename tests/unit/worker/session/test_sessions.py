"""One session for each coordinator, run, generation and rank; none is shared across a fork."""

import os
from dataclasses import replace

import pytest

from muster.worker.errors import MusterError
from muster.worker.session import sessions
from muster.worker.session.session import SessionConfig
from muster.worker.transport import fork_guard

CONFIG = SessionConfig(endpoint="h:1", run_id="job1", generation=0, rank=3, host="node-0")


class FakeSession:
    def __init__(self, config: SessionConfig) -> None:
        self.config = config
        self.ended = False
        self.dismissed = False
        self.owner = os.getpid()
        self.claim = fork_guard.GrpcUsage("a session")
        self.reasons: list[str] = []

    def close(self, reason: str) -> None:
        if os.getpid() != self.owner:
            return
        self.ended = True
        self.reasons.append(reason)


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "Session", FakeSession)
    monkeypatch.setattr(sessions, "_sessions", {})
    monkeypatch.setattr(fork_guard, "_usages", [])
    monkeypatch.setattr(fork_guard, "_last", None)


def test_equal_configs_are_one_session():
    assert sessions.session_for(CONFIG) is sessions.session_for(replace(CONFIG))


@pytest.mark.parametrize(
    "other", [{"endpoint": "h:2"}, {"run_id": "job2"}, {"generation": 1}, {"rank": 4}, {"host": "node-1"}]
)
def test_different_configs_are_different_sessions(other: dict[str, object]):
    different = replace(CONFIG, **other)  # type: ignore[arg-type]
    assert different != CONFIG
    assert sessions.session_for(CONFIG) is not sessions.session_for(different)


def test_config_is_immutable():
    with pytest.raises(AttributeError):
        CONFIG.rank = 4  # type: ignore[misc]


def test_ended_session_is_replaced():
    first = sessions.session_for(CONFIG)
    first.ended = True  # type: ignore[misc]
    second = sessions.session_for(CONFIG)
    assert second is not first
    assert sessions.session_for(CONFIG) is second


def test_session_of_an_evicted_process_is_not_replaced():
    """Else the process would come back as another one if it made its barrier again."""
    first = sessions.session_for(CONFIG)
    first.ended = first.dismissed = True  # type: ignore[misc]
    assert sessions.session_for(CONFIG) is first


def test_close_says_goodbye_on_all_sessions_once():
    several = [sessions.session_for(CONFIG), sessions.session_for(replace(CONFIG, rank=4))]
    sessions.close("done")
    sessions.close("again")
    assert [one.reasons for one in several] == [["done"], ["done"]]  # type: ignore[attr-defined]
    assert sessions.session_for(CONFIG) not in several


def test_child_forked_beside_a_session_cannot_open_one(
    monkeypatch: pytest.MonkeyPatch,
):
    parents = sessions.session_for(CONFIG)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(MusterError, match="gRPC does not work across a fork"):
        sessions.session_for(CONFIG)
    sessions.close("the child ends")
    assert parents.reasons == []  # type: ignore[attr-defined]


def test_child_forked_before_any_session_opens_its_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert sessions.session_for(CONFIG) is sessions.session_for(CONFIG)

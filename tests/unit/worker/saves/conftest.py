"""What all tests of saves begin with."""

import pytest

from muster.worker.saves import groups


@pytest.fixture(autouse=True)
def a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """No group is taken, numbered or in doubt from another test."""
    for name, empty in (("_taken", set()), ("_numbered", set()), ("_in_doubt", {})):
        monkeypatch.setattr(groups, name, empty)

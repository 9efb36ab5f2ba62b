"""Puts a handler into a call that the guard has admitted."""

from collections.abc import Iterator
from contextlib import contextmanager

from muster.service.rpc.interceptors.guard import ADMISSION, Admission


@contextmanager
def admitted(admission: Admission) -> Iterator[None]:
    """Give the tasks of this block an admission."""
    before = ADMISSION.set(admission)
    try:
        yield
    finally:
        ADMISSION.reset(before)

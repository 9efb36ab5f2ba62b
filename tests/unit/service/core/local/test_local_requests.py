"""Reports of keepers that are out of bounds are refused."""

import pytest

from muster.client.protocol import MAX_HOLDINGS
from muster.service.core.local_requests import DIGEST_BYTES
from muster.service.core.vocabulary.effects import Refused
from muster.service.core.vocabulary.limits import Limits
from muster.service.core.vocabulary.local import Attempt, Holding, ReportKeeper, ReportTaken
from muster.service.core.vocabulary.refusal import Reason
from tests.support.keepers.scripted_job import RUN, Job

FIRST = Attempt(1, 0)
DIGEST = bytes(DIGEST_BYTES)
TOO_MANY = frozenset(range(Limits().max_world_size + 1))


@pytest.mark.parametrize(
    ("holdings", "field"),
    [
        ((Holding(FIRST, DIGEST[1:], frozenset({0})),), "holding.manifest_digest"),
        ((Holding(FIRST, DIGEST * 1_000, frozenset({0})),), "holding.manifest_digest"),
        ((Holding(FIRST, DIGEST, TOO_MANY),), "holding.ranks"),
        ((Holding(FIRST, DIGEST, frozenset({0}), TOO_MANY),), "holding.persisted_ranks"),
        (
            tuple(Holding(Attempt(1, number), DIGEST, frozenset()) for number in range(MAX_HOLDINGS + 1)),
            "holdings",
        ),
    ],
)
def test_holding_out_of_bounds_is_refused(holdings: tuple[Holding, ...], field: str):
    job = Job().connect_all()
    session = job.session()
    job.step(ReportKeeper(session, RUN, "k0", holdings, 0))
    answer = job.answer(session)
    assert isinstance(answer, Refused)
    assert answer.refusal.reason is Reason.INVALID_ARGUMENT
    assert field in answer.refusal.message


def test_holdings_within_bounds_are_taken():
    job = Job().connect_all()
    session = job.session()
    holdings = tuple(Holding(Attempt(1, number), DIGEST, frozenset()) for number in range(MAX_HOLDINGS))
    job.step(ReportKeeper(session, RUN, "k0", holdings, 0))
    assert isinstance(job.answer(session), ReportTaken)

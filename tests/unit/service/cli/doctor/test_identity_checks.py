"""What the doctor says of a token that an issuer signed."""

import pytest

from muster.service.cli.doctor.checks import Result
from muster.service.cli.doctor.identity_checks import identity
from tests.support.issuer import Issuer

NOW = 1_700_000_000.0


def test_a_good_token_is_told_with_its_end():
    found = identity(f"Bearer {Issuer().token(now=NOW)}", NOW)
    assert found is not None
    assert (found.name, found.result) == ("identity", Result.OK)
    assert found.message == (
        "the token is of system:serviceaccount:team-a:trainer by "
        "https://kubernetes.default.svc.cluster.local, for the audience muster, and expires in 10m0s"
    )


def test_expired_token_fails_with_the_next_step():
    found = identity(f"Bearer {Issuer().token(now=NOW, aud=None)}", NOW + 601)
    assert found is not None
    assert found.result is Result.FAILED
    assert "for the audience nobody, and expired at 2023-11-14 22:23:20Z" in found.message
    assert "not a copy of it" in found.next


@pytest.mark.parametrize("authorization", ["", "Bearer static-0123456789", "Bearer e30.e30.", "Bearer a.b.c"])
def test_of_other_tokens_there_is_nothing_to_say(authorization: str):
    assert identity(authorization, NOW) is None

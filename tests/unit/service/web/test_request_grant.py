"""The grant that restricts which runs a page shows."""

from aiohttp.test_utils import make_mocked_request

from muster.service.security.grants import Grant, Role
from muster.service.web.request_grant import GRANT, restricting_grant


def test_only_a_grant_for_some_runs_narrows_a_page():
    some = Grant(name="a", role=Role.VIEWER, runs=("a-*", "b"), digest=b"")
    every = Grant(name="all", role=Role.VIEWER, runs=("a-*", "*"), digest=b"")
    request = make_mocked_request("GET", "/")
    assert restricting_grant(request) is None
    for grant, narrowed in ((None, None), (every, None), (some, some)):
        request[GRANT] = grant
        assert restricting_grant(request) is narrowed

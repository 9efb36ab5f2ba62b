"""What imports change in the environment, workers have too."""

from hypothesis import given
from hypothesis import strategies as st

from muster.preload.fork_server import Changes

NAMES = st.sampled_from(["A", "B", "C", "D"])
ENVIRONMENTS = st.dictionaries(NAMES, st.sampled_from(["1", "2", ""]))


@given(ENVIRONMENTS, ENVIRONMENTS)
def test_changes_lead_from_one_environment_to_the_other(before: dict[str, str], after: dict[str, str]):
    assert Changes.between(before, after).apply(before) == after


def test_variables_of_one_worker_stay_its_own():
    changes = Changes.between({}, {"RANK": "0", "GRPC_ENABLE_FORK_SUPPORT": "0"})
    assert changes.apply({"RANK": "5"}) == {"RANK": "5", "GRPC_ENABLE_FORK_SUPPORT": "0"}

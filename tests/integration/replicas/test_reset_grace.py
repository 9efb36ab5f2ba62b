"""A leader whose connections are reset is found again within the default reset grace."""

import uuid
from pathlib import Path

from lab.patience import until
from lab.processes.etcd import cluster
from lab.processes.replicas import SAFE_LEASE_TTL, replicas
from tests.support.ranks import everyone, ranks
from tests.support.waiters import wait_for_arrivals

REFUSALS = 4
"""Two attempts of each rank: the second one is after a standby held its call for a second."""


def test_ranks_of_a_leader_that_resets_and_refuses_are_not_lost(tmp_path: Path):
    defaults = ("--session-ttl=10", "--reset-grace=3")
    with (
        cluster() as etcd,
        replicas(tmp_path, etcd, prefix=uuid.uuid4().hex, extra=defaults, lease_ttl=SAFE_LEASE_TTL) as three,
        ranks(three.endpoint, 2) as world,
    ):
        everyone(world)
        leader = three.leader()
        world[1].tell("barrier")
        wait_for_arrivals(leader.endpoint, 1)
        (proxy,) = leader.to_workers
        proxy.cut(refuse=True)
        until(lambda: proxy.refused >= REFUSALS)
        proxy.heal()
        assert world[0].ask("barrier").outcome == "RELEASED"
        assert world[1].answer().outcome == "RELEASED"
        assert not leader.coordinator.log("member.gone")

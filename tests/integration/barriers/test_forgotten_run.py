"""A run that is forgotten under those who use it: all of them are told, and nobody hangs."""

import json
from concurrent.futures import Future
from datetime import timedelta

import pytest
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousParameters

from lab.patience import PATIENCE, until
from lab.processes.command import job, muster, output
from lab.processes.coordinator import Coordinator
from muster.worker import CoordinatorStore, RefusedError
from muster.worker.rendezvous import create_handler
from tests.support.ranks import everyone, ranks
from tests.support.rendezvous_runs import in_thread

pytestmark = pytest.mark.also_through_relay

RUN = "doomed"


def test_ranks_nodes_and_waits_end_with_the_run_and_do_not_begin_it_again(coordinator: Coordinator):
    params = RendezvousParameters(
        "muster", coordinator.endpoint, RUN, min_nodes=2, max_nodes=2, local_addr="127.0.0.1"
    )
    handler, store = create_handler(params), CoordinatorStore(coordinator.endpoint, RUN)
    with ranks(coordinator.endpoint, 2, run_id=RUN) as (zero, one):
        everyone([zero, one])
        zero.tell("barrier")
        join = in_thread(handler.next_rendezvous)
        wait: Future[None] = in_thread(lambda: store.wait(["never"], timedelta(minutes=10)))

        def shown() -> str:
            return output(coordinator.endpoint, "forget", RUN, "--force", "--dry-run")

        everything = ("2 processes", "1 node", "1 call that", '"checkpoint" #1')
        until(lambda: all(part in shown() for part in everything), shown)
        output(coordinator.endpoint, "forget", RUN, "--force")
        ended = "run doomed was forgotten: an operator asked for it"
        heard = zero.answer()
        assert (heard.reason, heard.message.startswith(ended)) == ("RUN_FORGOTTEN", True)
        again = one.ask("barrier")
        assert again.reason == "RUN_FORGOTTEN"
        with pytest.raises(RendezvousClosedError, match=ended):
            join.result(PATIENCE)
        with pytest.raises(RefusedError, match=ended):
            wait.result(PATIENCE)
        assert handler.is_closed()
        assert not handler.shutdown()
        assert one.ask("barrier").reason == "RUN_FORGOTTEN"
    assert RUN not in muster(coordinator.endpoint, "get", "runs").stdout


def test_the_id_of_a_closed_run_can_be_used_again_at_once(coordinator: Coordinator):
    with job(coordinator):
        pass
    output(coordinator.endpoint, "close", "job1")
    coordinator.restart()
    assert json.loads(output(coordinator.endpoint, "forget", "job1", "--force", "-o", "json"))
    coordinator.restart()
    with job(coordinator) as running:
        assert running.get().sequence == 1
        assert running.get().generation == 0

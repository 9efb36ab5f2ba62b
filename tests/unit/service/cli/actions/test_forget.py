from muster.service.cli.actions.forget import forgetting_text
from muster.v1 import common_pb2, run_pb2

AFFECTED = run_pb2.ForgetResponse(
    processes=3,
    nodes=1,
    waiting_calls=2,
    open_barriers=[common_pb2.BarrierName(prefix="checkpoint", sequence=7)],
)


def test_dry_run_lists_affected_processes_nodes_calls_and_barriers():
    request = run_pb2.ForgetRequest(run_id="job1", force=True, dry_run=True)
    assert forgetting_text(request, AFFECTED) == (
        "would forget run job1\n"
        "  sent away: 3 processes\n"
        "  without a place: 1 node\n"
        "  refused: 2 calls that wait for its keys\n"
        '  without an outcome: barrier "checkpoint" #7 of run job1'
    )


def test_completed_forget_is_described_in_the_words_of_the_log():
    request = run_pb2.ForgetRequest(run_id="job1")
    assert forgetting_text(request, run_pb2.ForgetResponse()) == (
        "run job1 was forgotten: an operator asked for it (muster forget)\n  nobody used it"
    )

from muster.service.cli.actions.evict import eviction_text
from muster.v1 import common_pb2, run_pb2
from tests.unit.service.cli import samples

AFFECTED = run_pb2.EvictResponse(
    members=[samples.member(3), samples.member(3, state=common_pb2.MEMBER_STATE_DISCONNECTED)],
    failed_barriers=[common_pb2.BarrierName(prefix="checkpoint", sequence=7)],
)


def test_dry_run_lists_affected_processes_and_barriers():
    request = run_pb2.EvictRequest(run_id="job1", rank=3, dry_run=True)
    assert eviction_text(request, AFFECTED) == (
        "would evict rank 3 of run job1\n"
        "  rank 3 (node-0, pid 4003), connected, is sent away\n"
        "  rank 3 (node-0, pid 4003), disconnected, is sent away\n"
        '  barrier "checkpoint" #7 of run job1 needs it, and fails'
    )


def test_completed_eviction_is_described_in_the_past_tense():
    request = run_pb2.EvictRequest(run_id="job1", rank=3, reason="bad\x1b[2J\nGPU")
    assert eviction_text(request, AFFECTED) == (
        "rank 3 of run job1 was evicted: bad\\x1b[2J\n"
        "    GPU\n"
        "  rank 3 (node-0, pid 4003), connected, was sent away\n"
        "  rank 3 (node-0, pid 4003), disconnected, was sent away\n"
        '  barrier "checkpoint" #7 of run job1 needed it, and failed'
    )

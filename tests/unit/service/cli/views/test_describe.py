from types import SimpleNamespace

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from muster.service.cli.views import describe
from muster.service.cli.views.describe import barrier_text, member_text, run_text
from muster.v1 import common_pb2, rendezvous_pb2, run_pb2
from tests.unit.service.cli import samples

NOBODY = samples.rendezvous(min_nodes=0, max_nodes=0)
"""The rendezvous of a run that no node has joined."""


def test_an_open_barrier():
    absent = [samples.missing(3), samples.missing(11, host="", state=1)]
    assert barrier_text(samples.waiting(*absent)) == (
        "Run:         job1\n"
        "Prefix:      checkpoint\n"
        "Sequence:    7\n"
        "Generation:  0\n"
        "State:       OPEN\n"
        "Arrived:     14 of 16\n"
        "Waited:      41s\n"
        "Left:        4m19s\n"
        "\n"
        "Message:\n"
        '  barrier "checkpoint" #7 of run job1 has waited 41 s\n'
        "\n"
        "Missing:\n"
        "  RANK   HOST     PID    STATE          GONE   LAST\n"
        "  3      node-1   4003   NOT_ARRIVED    -      6\n"
        "  11     -        -      NEVER_JOINED   -      6"
    )


def test_a_decided_barrier_shows_the_coordinators_message_as_it_is():
    text = barrier_text(samples.decided(samples.missing(11)))
    assert "State:       TIMED_OUT\n" in text
    assert "Decided:     2026-09-21T14:13:20Z\n" in text
    assert "Last:        rank 5, 12ms after the first\n" in text
    assert '  barrier "checkpoint" #6 of run job1 timed out after 300 s\n    arrived 15 of 16\n' in text


def test_votes_are_shown_and_cannot_speak_to_the_terminal():
    vote = common_pb2.Failure(rank=3, host="node-0", pid=7, reason="disk\x1b[2J full\nreally")
    payload = common_pb2.Payload(rank=0, data=b"x" * 2000)
    text = barrier_text(
        samples.decided(
            outcome=common_pb2.OUTCOME_ABORTED,
            message="was\x1b[2J aborted",
            failures=[vote],
            payloads=[payload],
        )
    )
    assert "  3      node-0   7     disk\\x1b[2J full\\nreally" in text
    assert "  was\\x1b[2J aborted" in text
    assert "Payloads:    2,000 bytes" in text


def test_all_missing_of_a_large_job_are_listed():
    text = barrier_text(samples.waiting(*map(samples.missing, range(4096)), required=4096, arrived=0))
    assert text.count("NOT_ARRIVED") == 4096


def test_a_run_shows_its_members_host_by_host():
    members = [samples.member(rank, host=f"node-{rank // 8}", node_rank=rank // 8) for rank in range(15)]
    members.append(samples.member(15, host="node-1", node_rank=1, state=common_pb2.MEMBER_STATE_LOST))
    text = run_text(samples.run(store_keys=2, store_bytes=4_096), NOBODY, members, [samples.decided()])
    assert "State:       OPEN\n" in text
    assert "Store:       2 keys, 4,096 bytes\n" in text
    assert "Connected:   15 of 16 ranks seen\n" in text
    assert (
        "Members:\n"
        "  HOST     NODE   STATE       RANKS\n"
        "  node-0   0      CONNECTED   0-7\n"
        "  node-1   1      CONNECTED   8-14\n"
        "  node-1   1      LOST        15\n"
    ) in text
    assert "Barriers:\n  RUN    PREFIX" in text


def test_run_shows_its_step_range_its_last_rank_and_the_time_without_progress():
    members = [samples.member(rank, step=7 - rank, step_ms=60_000 - rank * 9_000) for rank in range(3)]
    members.append(samples.member(3, state=common_pb2.MEMBER_STATE_LOST, step=9, step_ms=1_000))
    steps = run_pb2.RunSteps(highest=7, lowest=5, lowest_rank=2)
    text = run_text(samples.run(steps=steps), NOBODY, members, [])
    assert "Steps:       5-7; rank 2 is last; none moved for 42s\n" in text
    steps = run_pb2.RunSteps(highest=7, lowest=7)
    assert "Steps:       7; none moved for 42s\n" in run_text(samples.run(steps=steps), NOBODY, members, [])
    assert "Steps" not in run_text(samples.run(), NOBODY, members, [])


def test_run_shows_its_newest_checkpoint_in_a_line():
    text = run_text(samples.run(checkpoints=samples.checkpoints()), NOBODY, [], [])
    assert (
        "Checkpoint:  step 1200, committed 4m12s ago; 96.0 GiB; slowest write 12s: rank 3 (node-0); "
        "12 so far, usually one every 10m0s\n"
    ) in f"{text}\n"
    assert "Failed saves" not in text
    assert "Checkpoint" not in run_text(samples.run(), NOBODY, [], [])


def test_run_shows_what_its_ranks_told_of_a_checkpoint_and_no_more():
    bare = samples.checkpoints(newest=run_pb2.Checkpoint(), committed=1, interval_ms=None)
    text = run_text(samples.run(checkpoints=bare), NOBODY, [], [])
    assert text.endswith("Checkpoint:  committed 4m12s ago; 1 so far")


def test_run_shows_its_failed_saves_and_their_reasons():
    checkpoints = samples.checkpoints(failures=2)
    checkpoints.ClearField("newest")
    text = run_text(samples.run(checkpoints=checkpoints), NOBODY, [], [])
    assert "Checkpoint:  none was committed; 2 saves failed\n" in text
    assert (
        "Failed saves:\n"
        "  FAILED AT              STEP   BARRIER   REASON\n"
        "  2026-09-21T14:13:20Z   1100   save#10   was aborted: rank 3 failed: disk\\x1b[2J full\n"
    ) in text


def test_run_shows_the_deadline_of_a_requested_save_and_the_late_ranks(monkeypatch: pytest.MonkeyPatch):
    now = samples.DECIDED_AT
    monkeypatch.setattr(describe, "time", SimpleNamespace(time=lambda: float(now)))
    save = run_pb2.Save(
        number=5,
        state=run_pb2.SAVE_STATE_ASKED,
        by="ann@desk",
        asked_at=Timestamp(seconds=now - 33),
        deadline=Timestamp(seconds=now + 87),
    )
    text = run_text(samples.run(save=save), NOBODY, [], [])
    assert "  Deadline:  2026-09-21T14:14:47Z (87 s left)" in text
    assert "Late" not in text
    save.deadline.FromSeconds(now - 4)
    save.late = "rank that had not agreed on a step: rank 6 (pod\x1b[2J)"
    text = run_text(samples.run(save=save), NOBODY, [], [])
    assert "  Deadline:  2026-09-21T14:13:16Z (its deadline passed 4 s ago)\n" in text
    assert "  Late:      rank that had not agreed on a step: rank 6 (pod\\x1b[2J)" in text
    save.ended_at.FromSeconds(now - 1)
    assert "  Deadline:  2026-09-21T14:13:16Z\n" in run_text(samples.run(save=save), NOBODY, [], [])
    save.ClearField("deadline")
    assert "Deadline" not in run_text(samples.run(save=save), NOBODY, [], [])


def test_a_rank_with_two_processes_is_named_once_in_a_run():
    text = run_text(samples.run(), NOBODY, [samples.member(0), samples.member(0), samples.member(1)], [])
    assert "RANKS\n  node-0   -      CONNECTED   0-1" in text
    assert "Rendezvous:" not in text
    assert "Barriers:\n" not in text


def test_a_member_shows_its_processes_and_what_misses_it():
    absent = samples.missing(3)
    text = member_text("job1", 3, [samples.member(3)], NOBODY, [samples.waiting(absent, samples.missing(4))])
    assert "Process:      4003 on node-0\nNode:         -\nState:        CONNECTED for 65s\n" in text
    assert "Last seen:    now\n" in text
    assert "Groups:       checkpoint #6, eval #-\n" in text
    assert text.endswith(
        "Missing from:\n"
        '  barrier "checkpoint" #7 of run job1 (OPEN): rank 3 (node-1, pid 4003, connected, still at #6)'
    )


def test_a_rank_that_never_joined_is_shown_by_what_misses_it():
    absent = samples.missing(3, host="", state=common_pb2.MISSING_STATE_NEVER_JOINED)
    text = member_text("job1", 3, [], NOBODY, [samples.waiting(absent)])
    assert text.endswith("rank 3 (never joined)")


def test_a_run_shows_its_rendezvous_and_how_it_was_closed():
    gone = rendezvous_pb2.DepartedNode(node=samples.node(7), reason="connection\x1b[2J lost", since_ms=41_000)
    rendezvous = samples.rendezvous(
        samples.place(0, rank=0),
        samples.place(1, rank=1, connected=False, since_ms=3_000),
        samples.place(2, rendezvous_pb2.NODE_STANDING_WAITING),
        samples.place(3, rendezvous_pb2.NODE_STANDING_REDUNDANT, address="\x1b[2J"),
        round=1,
        complete=True,
        departed=[gone],
        rounds=[samples.completed_round(1), samples.completed_round(0)],
        message="round 1 is complete",
    )
    assert (
        "Rendezvous:\n"
        "  Round:    1\n"
        "  State:    COMPLETE\n"
        "  Message:  round 1 is complete\n"
        "\n"
        "Nodes:\n"
        "  RANK   ADDRESS   PID   PLACE         STATE          SINCE\n"
        "  0      node-0    900   PARTICIPANT   CONNECTED      65s\n"
        "  1      node-1    901   PARTICIPANT   DISCONNECTED   3s\n"
        "  -      node-2    902   WAITING       CONNECTED      65s\n"
        "  -      \\x1b[2J   903   REDUNDANT     CONNECTED      65s\n"
        "\n"
        "Gone nodes:\n"
        "  ADDRESS   PID   ROUND   AGO   REASON\n"
        "  node-7    907   0       41s   connection\\x1b[2J lost"
    ) in run_text(samples.run(), rendezvous, [], [])

    how = samples.closed(reason="")
    rendezvous.closed.CopyFrom(how)
    text = run_text(samples.run(closed=how), rendezvous, [], [])
    assert "State:       CLOSED\n" in text
    assert "Closed:\n  By:      ann@desk\n  Reason:  -\n  At:      2026-09-21T14:13:20Z\n" in text
    assert "Rendezvous:\n  Round:  1\n  State:  CLOSED\n\n" in text


def test_a_member_shows_its_node_and_when_it_was_last_seen():
    process = samples.member(3, state=common_pb2.MEMBER_STATE_LOST, node_rank=1)
    rendezvous = samples.rendezvous(samples.place(5, rank=0), samples.place(6, rank=1), complete=True)
    text = member_text("job1", 3, [process], rendezvous, [])
    assert "Node:         1, node-6 (pid 906)\n" in text
    assert "State:        LOST for 65s\nLast seen:    65s ago\nRelay:        -\n" in text
    process.relay = "node-6 (pid 70)"
    assert "Relay:        node-6 (pid 70)\n" in member_text("job1", 3, [process], rendezvous, [])
    # A node that has left the round has no address any more.
    assert "Node:         1\n" in member_text("job1", 3, [process], NOBODY, [])

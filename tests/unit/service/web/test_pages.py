import dataclasses
import re
from collections.abc import Iterator
from itertools import cycle, pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lab import scenes
from muster.service.core import barrier_views, views
from muster.service.core.local.views import KeeperView, LocalCheckpointView, LocalTierView
from muster.service.core.rendezvous.nodes import Departed
from muster.service.core.vocabulary import report
from muster.service.core.vocabulary.local import (
    Attempt,
    Disk,
    Holding,
    KeeperInfo,
    Level,
    LocalCheckpoint,
)
from muster.service.core.vocabulary.model import (
    Checkpoint,
    CheckpointHistory,
    Closed,
    Decision,
    FailedSave,
    MemberState,
    MissingRank,
    MissingState,
    NodeInfo,
    NodeStanding,
    Outcome,
    RendezvousSettings,
    Save,
    SaveState,
    SlowestWrite,
)
from muster.service.core.vocabulary.records import RoundRecord
from muster.service.core.vocabulary.refusal import Reason, Refusal
from muster.service.formatting.save_groups import SAVE_GROUPS
from muster.service.snapshots import Snapshots
from muster.service.web import page_data, pages
from muster.service.web.page_data import Overview, RunData
from tests.support.expect import some
from tests.unit.service.web.markup import Markup

HOSTILE = [
    "<script>alert(1)</script>",
    "\"><img src=x onerror='alert(1)'>",
    "' onmouseover='alert(1)",
    "</title></main><h1>",
    "<!-- ",
    "]]>",
    "&lt;b&gt;&#x3c;",
    "{{ 7 * 7 }}{% raw %}",
    "javascript:alert(1)",
    "../../etc/passwd",
    "..",
    "%00%2f%3cscript%3e",
    "\x1b[31mred\x1b[0m\x07",
    "two\nlines\r\n\x85\u2028",
    "\u202e\u2066live\u2069\u200b\ufeff",
    "\x00",
    "é" * 128,
    "W" * 256,
    "שלום",
]

texts = st.sampled_from(HOSTILE) | st.text(st.characters(codec="utf-8"), min_size=1, max_size=40).filter(
    lambda text: text not in SAVE_GROUPS  # Those are labelled, so that they look different.
)


def a_look(words: Iterator[str], lines: int) -> tuple[Overview, RunData]:
    """A state with a word that someone chose in every place where there may be one."""
    run_id, prefix = next(words), next(words)

    def missing(state: MissingState, rank: int) -> MissingRank:
        host = "" if state is MissingState.NEVER_JOINED else next(words)
        return MissingRank(rank, state, host, rank, 1.0, 2, next(words))

    def barrier(count: int, decision: Decision | None = None) -> barrier_views.BarrierView:
        states = cycle(MissingState)
        message = decision.message if decision else next(words)
        return barrier_views.BarrierView(
            run_id=run_id,
            prefix=prefix,
            sequence=7,
            generation=0,
            arrived=3,
            required=3 + count,
            age=10.0,
            remaining=1.0,
            missing=tuple(missing(next(states), rank) for rank in range(count)),
            decision=decision,
            message=message,
        )

    decision = Decision(
        run_id=run_id,
        prefix=prefix,
        sequence=6,
        generation=0,
        outcome=Outcome.ABORTED,
        message="\n".join(next(words).replace("\n", " ") for _ in range(lines)),
        missing=(),
        arrived=1,
        required=2,
        payloads=(),
        failures=(),
        decided_at=1e9,
        wait=1.0,
        skew=0.0,
        last_arrival_rank=None,
    )
    closed = Closed(next(words), next(words), 1e9)
    save = Save(
        number=1,
        state=SaveState.ASKED,
        stop=True,
        by=next(words),
        reason=next(words),
        asked_at=1e9 - 33.0,
        since=0,
        deadline=1e9 + 87.0,
        late=next(words),
    )
    run = views.RunView(
        run_id=run_id,
        generation=1,
        connected=1,
        members=2,
        groups=1,
        open_barriers=9,
        decided_barriers=1,
        round=0,
        nodes=1,
        nodes_waiting=1,
        store_keys=0,
        store_bytes=0,
        closed=closed,
        stopped=None,
        steps=views.StepsView(highest=7, lowest=5, lowest_rank=1, moved_at=1.0),
        save=save,
        checkpoints=views.CheckpointsView(
            history=CheckpointHistory(
                newest=Checkpoint(7, 1e9, 2**30, SlowestWrite(3, next(words), 12.5), prefix, 5),
                committed=6,
                intervals=(60.0, 60.0),
                failures=(FailedSave(6, 1e9, next(words), next(words), 4),),
            ),
            age=41.0,
            unsaved=41.0,
        ),
    )
    waiting = (barrier(3), barrier(report.MAX_NAMED_SINGLY + 10))
    decided = (barrier(0, decision),)
    node = views.NodeView(
        info=NodeInfo(next(words), next(words), 5),
        standing=NodeStanding.PARTICIPANT,
        rank=0,
        connected=True,
        since=1.0,
    )
    rendezvous = views.RendezvousView(
        run_id=run_id,
        round=0,
        complete=True,
        settings=RendezvousSettings(
            min_nodes=1, max_nodes=2, join_timeout=1, last_call_timeout=1, keep_alive_timeout=1
        ),
        nodes=(node,),
        departed=(Departed(NodeInfo(next(words), next(words), 6), 0, next(words), 1.0),),
        now=2.0,
        rounds=(RoundRecord(run_id, 0, 1, 1e9, 1.0),),
        closed=closed,
        stopped=None,
        message=next(words),
    )

    def local_tier() -> LocalTierView:
        attempt = Attempt(1, 4)
        keepers = tuple(
            KeeperView(
                info=KeeperInfo(f"keeper-{number}", next(words), next(words), next(words), next(words)),
                connected=True,
                ranks=(number,),
                copies_to=("keeper-0", next(words)),
                disk=Disk(2, 3),
                holdings=(Holding(attempt, b"digest", frozenset({number})),),
            )
            for number in range(2)
        )
        checkpoint = LocalCheckpoint(attempt, 9, 2, 1, b"digest", 1, next(words), size=2**30)
        shown = LocalCheckpointView(
            checkpoint, Level.LOCAL, next(words), (), ("keeper-0", next(words)), 7.0, next(words)
        )
        return LocalTierView((shown,), keepers, next(words))

    hosts = tuple(
        views.HostView(
            host=next(words),
            node_rank=0,
            relay=next(words),
            state=state,
            ranks=(int(state),),
            steps=(5, 7) if state is MemberState.CONNECTED else None,
        )
        for state in MemberState
    )
    return (
        Overview(taken_at=1e9, epoch=1, only=(next(words),), runs=(run,), waiting=waiting, decided=decided),
        RunData(
            taken_at=1e9,
            run=run,
            rendezvous=rendezvous,
            waiting=waiting,
            decided=decided,
            still=4.0,
            local=local_tier(),
            hosts=hosts,
        ),
    )


def both(words: list[str], lines: int) -> list[str]:
    overview, run = a_look(cycle(words), lines)
    return [pages.overview_page(overview, ""), pages.run_page(run, "../")]


@settings(deadline=None)
@given(st.lists(texts, min_size=1, max_size=30), st.integers(1, 4))
@example(HOSTILE, 3)
@example(["<script>"], 1)
def test_hostile_data_adds_no_markup(words: list[str], lines: int):
    # The same hosts fold into the same rows, so that the benign twin of a word is as different as it is.
    benign = {word: f"w{number}" for number, word in enumerate(dict.fromkeys(words))}
    for hostile_page, benign_page in zip(
        both(words, lines), both([benign[word] for word in words], lines), strict=True
    ):
        page, expected = Markup(hostile_page), Markup(benign_page)
        assert page.skeleton == expected.skeleton
        assert all(char.isprintable() or char == "\n" for char in hostile_page), "a control is not visible"
        for name in ("href", "src"):
            assert all(re.fullmatch(r"[\w./%~?=-]*", value, re.ASCII) for value in page.of(name))
        assert all(re.fullmatch("[a-z]+|m[0-9a-f]{16}", value) for value in page.of("id"))
        for name in ("class", "d", "scope", "datetime", "width"):
            assert list(page.of(name)) == list(expected.of(name))
        attributes = {name for _, name, _ in page.values}
        assert not any(name.startswith("on") or name == "style" for name in attributes)


def test_hostile_data_is_readable_as_text():
    overview, run = a_look(cycle(HOSTILE), 3)
    for page in (pages.overview_page(overview, ""), pages.run_page(run, "../")):
        text = Markup(page).text
        assert "<script>alert(1)</script>" in text
        assert "\"><img src=x onerror='alert(1)'>" in text


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        ("\x1b[31m", "\\x1b[31m"),
        ("a\nb", "a\\nb"),
        ("\u202eabc", "\\u202eabc"),
        ("größe ✓", "größe ✓"),
        (7, 7),
    ],
)
def test_controls_are_shown(data: object, shown: object):
    assert pages.visible(data) == shown


# ---------------------------------------------------------------------- what is there


@pytest.fixture(scope="module")
def sixteen() -> scenes.Scene:
    return scenes.sixteen()


@pytest.fixture(scope="module")
def many() -> scenes.Scene:
    return scenes.many(512)


def overview_of(scene: scenes.Scene) -> Markup:
    return Markup(
        pages.overview_page(page_data.take_overview(scene.coordinator, scene.instant, Snapshots()), "")
    )


def run_of(scene: scenes.Scene, run_id: str) -> Markup:
    return Markup(
        pages.run_page(page_data.take_run(scene.coordinator, run_id, scene.instant, singly=False), "../")
    )


def test_overview_shows_all_runs_with_open_barriers_and_missing_ranks(sixteen: scenes.Scene):
    page = overview_of(sixteen)
    assert "llama-70b checkpoint #2 14 of 16 waiting 41s , 4m19s left" in page.text
    assert "rank 6 (gpu-a0, pid 4106, connected, still at #1)" in page.text
    assert "rank 11 (gpu-a1, pid 4111, connection lost 6 s ago)" in page.text
    assert "save #1 save: writes" in page.text
    assert "vit-small OPEN 0 0 1 8 of 8 0 4 –" in page.text
    assert "llama-70b OPEN 0 0 2 15 of 16 2 4 31187-31200" in page.text
    assert "vit-sweep-3 CLOSED" in page.text
    assert "ABORTED was aborted: rank 3 (gpu-b0, pid 4103) failed: OSError" in page.text
    assert ("progress", "value", "14") in page.values
    assert {"runs/llama-70b", "runs/vit-small", "status.json"} <= set(page.of("href"))


def test_a_run_is_there_with_its_hosts_and_rounds(sixteen: scenes.Scene):
    page = run_of(sixteen, "llama-70b")
    assert "gpu-a0 6 4106 connected, still at #1 gpu-a1 11 4111 connection lost 6 s ago" in page.text
    assert "15 connected 1 disconnected" in page.text
    assert "gpu-a1 8-10, 12-15 1 – 31200 CONNECTED" in page.text
    assert "round 0 of run llama-70b is complete, with 2 nodes in it" in page.text
    assert "gpu-a1 1 901 participant CONNECTED" in page.text
    assert "../runs/llama-70b.json" in page.of("href")


def test_a_run_says_how_far_its_ranks_have_come(sixteen: scenes.Scene):
    page = run_of(sixteen, "llama-70b")
    assert "Step 31187-31200 rank 6 is last; none moved for 41s" in page.text
    assert "gpu-a0 0-7 0 – 31187-31200 CONNECTED" in page.text
    assert "Step" not in run_of(sixteen, "vit-sweep-3").text, "it tells no steps"


def test_page_of_a_run_shows_its_newest_checkpoint_and_its_failed_saves(sixteen: scenes.Scene):
    text = run_of(sixteen, "vit-small").text
    assert (
        "Checkpoints Newest step 1500 Committed 41s ago, at checkpoint #3 Size 688.0 GiB "
        "Slowest write 38s rank 7 on gpu-b0 So far 3 usually one every 7m22s"
    ) in text
    assert (
        "10m35s ago 14:57:10Z checkpoint #1 500 was aborted: rank 3 (gpu-b0, pid 4103) failed: "
        "OSError: [Errno 28] No space left on device"
    ) in text


def test_page_of_a_run_that_told_of_no_save_has_no_checkpoints(sixteen: scenes.Scene):
    assert "Checkpoints" not in run_of(sixteen, "vit-sweep-3").text


def test_page_shows_what_no_rank_told_as_nothing(sixteen: scenes.Scene):
    taken = page_data.take_run(sixteen.coordinator, "vit-small", sixteen.instant, singly=False)
    shown = some(taken.run.checkpoints)
    bare = dataclasses.replace(some(shown.history.newest), step=None, bytes=None, slowest=None)
    history = CheckpointHistory(newest=bare, committed=1)
    run = dataclasses.replace(taken.run, checkpoints=dataclasses.replace(shown, history=history))
    text = Markup(pages.run_page(dataclasses.replace(taken, run=run), "../")).text
    assert "Newest step – Committed 41s ago, at checkpoint #3 Size – Slowest write – So far 1 Members" in text


def test_page_of_a_run_with_only_failed_saves_says_that_none_was_committed(sixteen: scenes.Scene):
    taken = page_data.take_run(sixteen.coordinator, "vit-small", sixteen.instant, singly=False)
    shown = some(taken.run.checkpoints)
    history = CheckpointHistory(failures=shown.history.failures)
    run = dataclasses.replace(taken.run, checkpoints=dataclasses.replace(shown, history=history))
    text = Markup(pages.run_page(dataclasses.replace(taken, run=run), "../")).text
    assert "Checkpoints None was committed yet. When Failed save Step Why" in text


def test_page_of_a_run_shows_local_checkpoints_and_keepers():
    scene = scenes.local()
    text = run_of(scene, "llama-8b").text
    assert (
        "Local checkpoints Newest local 320 2s ago Newest replicated 310 62s ago "
        "Newest persisted 300 2m2s ago Single copies 4 of 4 parts of the newest Keepers connected 4 of 4"
    ) in text
    assert (
        "320 LOCAL 2s ago 48.0 GiB 1 node each parts of ranks 0-3 have too few copies "
        "losing any of 4 (gpu-d0, gpu-d1, gpu-d2, …) loses it"
    ) in text
    assert "310 REPLICATED 62s ago 48.0 GiB 2 nodes each" in text
    assert "300 PERSISTED 2m2s ago 48.0 GiB 2 nodes each – any node may be lost" in text
    assert re.search(r"gpu-d2 CONNECTED 2 gpu-d\d 96\.0 GiB of 160\.0 GiB \(60%\) rack-0", text)


def test_page_of_a_run_without_keepers_has_no_local_checkpoints(sixteen: scenes.Scene):
    assert "Local checkpoints" not in run_of(sixteen, "llama-70b").text


def test_page_of_a_run_with_keepers_alone_says_that_no_checkpoint_was_made():
    scene = scenes.Scene()
    scenes.Keepers(scene, "llama-8b", 2).lose(1)
    text = run_of(scene, "llama-8b").text
    assert "Local checkpoints Keepers connected 1 of 2 None was made yet." in text


def test_page_of_a_closed_run_shows_author_and_reason_of_the_close(sixteen: scenes.Scene):
    text = run_of(sixteen, "vit-sweep-3").text
    assert "Closed by ann@desk at 2026-09-21T14:30:00Z : the budget is spent" in text
    assert "No barrier is open." in text
    assert "8 lost" in text


def test_many_missing_ranks_are_folded_by_reason_and_host(many: scenes.Scene):
    text = overview_of(many).text
    assert "16 never joined: ranks 496-511" in text
    assert "8 connection lost: ranks 168-175" in text
    assert "33 connected, not arrived: ranks 37, 256-287 on 5 hosts" in text
    text = run_of(many, "moe-400b").text
    assert "h100-0032 256-263 4356-4363 connected, not arrived yet" in text
    assert "h100-0004 37 4137 connected, not arrived yet" in text
    assert (
        "TIMED_OUT timed out after 60 s (the first arrival's timeout) arrived 495 of 512; missing: rank 37 "
        in text
    )


def test_run_page_shows_the_activity_of_missing_ranks(sixteen: scenes.Scene, many: scenes.Scene):
    def doing(view: barrier_views.BarrierView) -> barrier_views.BarrierView:
        missing = (dataclasses.replace(one, doing=f"reads data.py:{one.rank % 2}") for one in view.missing)
        return dataclasses.replace(view, missing=tuple(missing))

    for scene, run_id, shown in (
        (sixteen, "llama-70b", "gpu-a0 6 4106 connected, still at #1: reads data.py:0 gpu-a1 11 4111"),
        (many, "moe-400b", "h100-0004 37 4137 connected, not arrived yet: reads data.py:1"),
    ):
        taken = page_data.take_run(scene.coordinator, run_id, scene.instant, singly=False)
        taken = dataclasses.replace(taken, waiting=tuple(map(doing, taken.waiting)))
        assert shown in Markup(pages.run_page(taken, "../")).text


def test_long_lists_are_folded_and_short_ones_are_open(many: scenes.Scene):
    page = run_of(many, "moe-400b")
    details = [names for tag, *names in page.skeleton if tag == "details"]
    assert len({*page.of("id")}) == len([*page.of("id")]), "an id is there twice"
    assert ["id", "class", "open"] in details, "few hosts are shown"
    assert ["id", "class"] in details, "many are shown when someone asks"


def test_a_barrier_is_the_same_element_at_every_look(many: scenes.Scene):
    before = set(run_of(many, "moe-400b").of("id"))
    many.now += 1
    assert set(run_of(many, "moe-400b").of("id")) == before


def test_the_missing_of_older_decisions_are_left_out_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch):
    scene = scenes.Scene()
    job = scenes.Job(scene, "job1", 16)
    job.join("checkpoint")
    for sequence in range(3):
        job.meet("checkpoint", sequence, without=(3, 4), timeout=10)
        scene.wait(11)
    taken = page_data.take_run(scene.coordinator, "job1", scene.instant, singly=False)
    assert Markup(pages.run_page(taken, "../")).text.count("missing: rank 3") == 3
    monkeypatch.setattr(page_data, "MAX_MISSING", 5)
    text = Markup(pages.run_page(taken, "../")).text
    assert text.count("timed out after 10 s") == 3
    assert text.count("missing: rank 3") == 2


def test_it_can_be_read_aloud(sixteen: scenes.Scene, many: scenes.Scene):
    for page in (overview_of(sixteen), run_of(sixteen, "llama-70b"), run_of(many, "moe-400b")):
        headings = [int(tag[1]) for tag, *_ in page.skeleton if re.fullmatch("h[1-6]", tag)]
        assert headings.count(1) == 1
        assert all(deeper - level <= 1 for level, deeper in pairwise(headings)), "a level is left out"
        for tag, needed in (
            ("th", "scope"),
            ("progress", "aria-label"),
            ("html", "lang"),
            ("td", "data-label"),
        ):
            assert all(needed in names for other, *names in page.skeleton if other == tag)
        assert all({"aria-label", "aria-hidden"} & {*names} for tag, *names in page.skeleton if tag == "svg")


def test_an_empty_coordinator_has_a_page():
    text = overview_of(scenes.Scene()).text
    assert "No barrier is open." in text
    assert "No run has said hello yet." in text


def test_open_barriers_that_are_not_shown_are_counted(sixteen: scenes.Scene):
    taken = page_data.take_overview(sixteen.coordinator, sixteen.instant, Snapshots())
    page = pages.overview_page(dataclasses.replace(taken, waiting=taken.waiting[:1]), "")
    assert "and 1 more" in Markup(page).text


def test_a_refusal_has_a_page():
    page = Markup(pages.refusal_page(Refusal(Reason.RUN_NOT_FOUND, 'run "<b>" is not known'), "../"))
    assert 'RUN_NOT_FOUND run "<b>" is not known' in page.text


def test_process_ids_are_folded_in_the_order_of_their_ranks():
    assert pages._in_order([5, 6, 7, 3, 9, 10]) == "5-7, 3, 9-10"

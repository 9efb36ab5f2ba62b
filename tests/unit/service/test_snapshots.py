"""Views of runs that all who look share."""

from lab.scenes import Job, Scene
from muster.service.core.coordinator import Coordinator
from muster.service.core.vocabulary.model import Instant
from muster.service.security.grants import Grant, Role
from muster.service.snapshots import INTERVAL, Snapshot, Snapshots
from muster.service.web import page_data


def two_teams() -> Scene:
    scene = Scene()
    for run_id in ("team-a/1", "team-b/1"):
        Job(scene, run_id, 8)
    return scene


def ids(snapshot: Snapshot) -> list[str]:
    return [one.view.run_id for one in snapshot.runs]


def later(scene: Scene, seconds: float) -> tuple[Coordinator, Instant]:
    scene.now += seconds
    return scene.coordinator, scene.instant


def test_callers_with_different_patterns_share_the_view_of_a_run():
    scene, snapshots = two_teams(), Snapshots()
    all_runs = snapshots.take(scene.coordinator, scene.instant)
    team_a = snapshots.take(*later(scene, INTERVAL / 2), ("team-a/*",))
    named = snapshots.take_one(scene.coordinator, scene.instant, "team-a/1")
    assert (ids(all_runs), ids(team_a), ids(named)) == (["team-a/1", "team-b/1"], ["team-a/1"], ["team-a/1"])
    assert all_runs.runs[0] is team_a.runs[0] is named.runs[0]
    assert team_a.taken_at == all_runs.taken_at < scene.now


def test_unchanged_counts_stay_the_same_object_in_later_views():
    scene, snapshots = two_teams(), Snapshots()
    (first, _) = snapshots.take(scene.coordinator, scene.instant).runs
    (second, _) = snapshots.take(*later(scene, INTERVAL)).runs
    assert second is not first
    assert second.counts is first.counts
    Job(scene, "team-a/1", 16)
    (third, _) = snapshots.take(*later(scene, INTERVAL)).runs
    assert third.view.connected == 16
    assert third.counts is not second.counts


def test_page_shows_the_views_that_watches_share():
    scene, snapshots = two_teams(), Snapshots()
    grant = Grant(name="ann", role=Role.VIEWER, runs=("team-a/*",), digest=b"")
    page = page_data.take_overview(scene.coordinator, scene.instant, snapshots, grant)
    watched = snapshots.take(scene.coordinator, scene.instant)
    assert [view.run_id for view in page.runs] == ["team-a/1"]
    assert page.runs[0] is watched.runs[0].view

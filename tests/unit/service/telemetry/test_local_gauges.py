"""Gauges of local checkpoints and keepers."""

from lab import scenes
from muster.service.core.vocabulary.local import Disk
from muster.service.core.vocabulary.model import Instant
from muster.service.telemetry.metrics import Metrics
from muster.service.telemetry.state_collector import StateCollector
from tests.support.expect import some
from tests.unit.service.telemetry.scraping import series, value

RUN = "llama-8b"


class SceneClock:
    """The scene's time, as the collector reads it."""

    def __init__(self, scene: scenes.Scene) -> None:
        self._scene = scene

    def now(self) -> Instant:
        return self._scene.instant


def watch(metrics: Metrics, scene: scenes.Scene) -> None:
    metrics.registry.register(StateCollector(scene.coordinator, metrics, SceneClock(scene)))


def of_run(metrics: Metrics, name: str, **labels: str) -> float | None:
    return value(metrics, f"muster_{name}", run=RUN, **labels)


def test_newest_checkpoint_of_each_level_has_its_step_and_age(metrics: Metrics):
    watch(metrics, scenes.local())
    found = {
        level: (
            of_run(metrics, "local_checkpoint_step", level=level),
            round(some(of_run(metrics, "local_checkpoint_age_seconds", level=level))),
        )
        for level in ("local", "replicated", "persisted")
    }
    assert found == {"local": (320, 2), "replicated": (310, 62), "persisted": (300, 122)}


def test_oldest_checkpoint_that_waits_is_behind(metrics: Metrics):
    scene = scenes.Scene()
    watch(metrics, scene)
    keepers = scenes.Keepers(scene, RUN, 4)
    keepers.save(1, 1)
    scene.wait(30)
    assert of_run(metrics, "local_checkpoint_behind_seconds") == 0, "all copies are there"
    keepers.save(2, 2, copies=False)
    scene.wait(20)
    keepers.save(3, 3, copies=False)
    scene.wait(5)
    assert of_run(metrics, "local_checkpoint_behind_seconds") == 25
    keepers.save(4, 4)
    assert of_run(metrics, "local_checkpoint_behind_seconds") == 0, "a newer one has its copies"
    keepers.persist_to = "s3://bucket/job1"
    keepers.save(5, 5)
    scene.wait(7)
    assert of_run(metrics, "local_checkpoint_behind_seconds") == 7, "it is not in shared storage"
    keepers.save(6, 6, persisted_as="s3://bucket/job1/step-6")
    assert of_run(metrics, "local_checkpoint_behind_seconds") == 0


def test_single_copies_and_domains_follow_the_loss_of_a_node(metrics: Metrics):
    scene = scenes.Scene()
    watch(metrics, scene)
    keepers = scenes.Keepers(scene, RUN, 4)
    keepers.save(1, 1, copies=False)
    assert of_run(metrics, "local_checkpoint_single_copies") == 4
    assert of_run(metrics, "local_checkpoint_domains") is None, "none is replicated"
    keepers.save(2, 2)
    assert of_run(metrics, "local_checkpoint_single_copies") == 0
    assert of_run(metrics, "local_checkpoint_domains") == 2
    keepers.lose(3)
    assert of_run(metrics, "local_checkpoint_single_copies") == 2
    assert of_run(metrics, "local_checkpoint_domains") == 1


def test_nodes_of_one_domain_hold_all_copies_in_it(metrics: Metrics):
    scene = scenes.Scene()
    watch(metrics, scene)
    scenes.Keepers(scene, RUN, 3, domains=1).save(1, 1)
    assert of_run(metrics, "local_checkpoint_domains") == 1
    assert of_run(metrics, "local_checkpoint_single_copies") == 0


def test_keepers_are_counted_with_their_space(metrics: Metrics):
    scene = scenes.Scene()
    watch(metrics, scene)
    keepers = scenes.Keepers(scene, RUN, 4, disk=Disk(30, 40))
    keepers.lose(0)
    assert of_run(metrics, "keepers", state="connected") == 3
    assert of_run(metrics, "keepers", state="disconnected") == 1
    assert of_run(metrics, "keeper_disk_used_bytes") == 90
    assert of_run(metrics, "keeper_disk_quota_bytes") == 120
    assert of_run(metrics, "keeper_disk_used_ratio") == 0.75


def test_keeper_of_a_node_that_left_the_run_does_not_count_as_disconnected(metrics: Metrics):
    scene = scenes.Scene()
    watch(metrics, scene)
    before = scenes.Keepers(scene, RUN, 4)
    scenes.Keepers(scene, RUN, 3, generation=2)
    before.lose(3)
    assert of_run(metrics, "keepers", state="connected") == 3
    assert of_run(metrics, "keepers", state="disconnected") == 0


def test_keepers_without_a_quota_have_no_ratio(metrics: Metrics):
    scene = scenes.Scene()
    watch(metrics, scene)
    scenes.Keepers(scene, RUN, 2, disk=Disk(30, 0))
    assert of_run(metrics, "keeper_disk_used_bytes") == 60
    assert of_run(metrics, "keeper_disk_used_ratio") is None


def test_run_without_local_checkpoints_has_none_of_the_series(metrics: Metrics):
    watch(metrics, scenes.sixteen())
    assert series(metrics, "muster_keepers") == []
    assert series(metrics, "muster_local_checkpoint_behind_seconds") == []

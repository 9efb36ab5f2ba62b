"""A watcher whose API server and coordinator come and go at random, while notices come and are withdrawn."""

import os
import random
from pathlib import Path

import pytest
import yaml

from lab.patience import until
from lab.processes.coordinator import free_port
from lab.processes.watcher import Watcher
from lab.watching import kubernetes_api
from lab.watching.kubernetes_api import KubernetesApi, disruption, node, pod
from tests.support.watching import drains as coordinators

IN_FORCE = 'muster_watcher_notices_in_force{source="kubernetes"}'


def act(api: KubernetesApi, rng: random.Random, number: int, there: set[str]) -> None:
    """Do one of the things that happen to a cluster."""
    match rng.choice(["come", "come", "go", "change", "break", "forget", "bookmark", "refuse", "allow"]):
        case "come":
            name = f"worker-{number}"
            api.put("pods", pod(name, status={"conditions": [disruption("EvictionByEvictionAPI")]}))
            there.add(name)
        case "go" if there:
            name = rng.choice(sorted(there))
            api.delete("pods", name, "team-a")
            there.discard(name)
        case "change" if there:
            deleted = {"deletionTimestamp": f"2030-01-01T00:{number % 60:02d}:00Z"}
            api.edit("pods", rng.choice(sorted(there)), "team-a", metadata=deleted)
        case "break":
            api.break_off()
        case "forget":
            api.forget()
        case "bookmark":
            api.bookmark()
        case "refuse":
            api.allows = lambda _: False
        case "allow":
            api.allows = lambda _: True


@pytest.mark.parametrize("seed", range(3))
def test_watcher_knows_what_is_in_force_whatever_happened(tmp_path: Path, seed: int, thorough: bool):
    rng, there = random.Random(seed), set[str]()
    address = f"127.0.0.1:{free_port()}"
    config = tmp_path / "kubeconfig"
    with kubernetes_api.running() as api:
        config.write_text(yaml.safe_dump(kubernetes_api.kubeconfig(api.url)))
        api.put("nodes", node())
        flags = (f"--kubeconfig={config}", "--namespace=team-a")
        watcher = Watcher(
            tmp_path, address, "node-1", "kubernetes", extra=flags, environment=dict(os.environ)
        )
        with watcher:
            for number in range(2_000 if thorough else 200):
                act(api, rng, number, there)
            api.allows = lambda _: True
            api.put("pods", pod("last", status={"conditions": [disruption("PreemptionByScheduler")]}))
            there.add("last")
            until(lambda: watcher.metric(IN_FORCE) == len(there))
            with coordinators.listening(address) as coordinator:
                ids = {f"kubernetes/pod/uid-of-{name}/2026-11-25T10:00:00Z" for name in there}
                coordinator.wait_for(lambda: set(coordinator.ids()) == ids, seconds=100.0)
            assert watcher.runs
            assert "Traceback" not in watcher.log

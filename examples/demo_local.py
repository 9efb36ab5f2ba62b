"""The last chapter of the demo: a job with local checkpoints loses a node and its disk."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import demo_local_rank
from demo_parts import MUSTER, NODES, PATIENCE, Audience, Coordinator, Node, headline, say, show

RUN = "demo-local"
STEPS = 200
PROGRAM = Path(__file__).with_name("demo_local_rank.py")


class LocalDemo:
    """Chapter 7: a job whose checkpoints are on its nodes."""

    def __init__(self, coordinator: Coordinator, folder: Path) -> None:
        self._coordinator = coordinator
        self._folder = folder
        self._audience = Audience()
        self._nodes: list[Node] = []

    def _disk(self, number: int) -> Path:
        return self._folder / f"disk-of-node-{number}"

    def _add_node(self) -> None:
        number = len(self._nodes)
        rank = [str(PROGRAM), str(self._folder), str(STEPS), str(self._disk(number))]
        endpoint, reports = self._coordinator.endpoint, self._audience.reports
        self._nodes.append(Node(number, endpoint, self._folder, reports, RUN, 1, rank))

    def lose_a_node_with_its_disk(self) -> None:
        """All of chapter 7."""
        headline(f"another job keeps its checkpoints on the disks of its {NODES} nodes, with one copy each")
        for _ in range(NODES):
            self._add_node()
        paused = self._audience.wait_for("paused", 0, NODES)
        step = paused[0].step
        self._wait_for_copies(step)
        endpoint = f"--endpoint={self._coordinator.endpoint}"
        show("get", "checkpoints", RUN, endpoint)
        victim = paused[1].node
        number = self._nodes.index(victim)
        disk, shared = self._disk(number), self._folder / "checkpoints"
        headline(
            f"a node is killed, its disk is wiped, and shared storage is gone (step {step} was not there yet)"
        )
        (keeper,) = disk.glob("*/keeper.json")
        victim.kill([paused[1].pid, json.loads(keeper.read_text())["pid"]])
        shutil.rmtree(disk)
        shared.rename(self._folder / "unreachable")
        demo_local_rank.continue_file(self._folder).touch()
        lost = time.monotonic()
        self._add_node()
        resumed = self._audience.wait_for("resumed", 1, NODES)
        if {one.step for one in resumed} != {step}:
            sys.exit(f"the ranks resumed from steps {[one.step for one in resumed]}, not {step}")
        took = time.monotonic() - lost
        say(f"   a fresh node took its place: all ranks resumed from step {step}, {took:.1f} s after")
        say("   the loss, from their own disks and a peer's. There was no shared storage to read.")
        (self._folder / "unreachable").rename(shared)
        self._audience.wait_for("done", 1, NODES)
        if any(node.end() != 0 for node in self._nodes if node is not victim):
            sys.exit(f"a node failed; the logs are in {self._folder}")
        say(f"   training finished at step {STEPS}")

    def _wait_for_copies(self, step: int) -> None:
        command = [str(MUSTER), "get", "checkpoints", RUN, "-o", "json"]
        command.append(f"--endpoint={self._coordinator.endpoint}")
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            for one in json.loads(shown).get("checkpoints", []):
                is_copied = one["level"] != "DURABILITY_LEVEL_LOCAL"
                if int(one["checkpoint"]["step"]) == step and is_copied:
                    return
            time.sleep(0.1)
        sys.exit(f"step {step} has no copies after {PATIENCE:.0f} s")

    def stop(self) -> None:
        """Stop what still runs."""
        for node in self._nodes:
            if node.process.poll() is None:
                node.stop()

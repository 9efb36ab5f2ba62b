"""How long the replacement of a node takes: ``python -m benchmarks.replace``.

Agents of torchrun with a rank each train on one machine, one of them on standby. Nodes are replaced by
``muster replace`` and killed, at random. Each new agent is a new process, so on a machine with few cores its
start takes most of the time. The ranks' states are checked at every step.
"""

import argparse
import tempfile
from pathlib import Path

from lab.processes.coordinator import Coordinator
from lab.replacing import ReplaceableJob, Replacing, judge


def main() -> None:
    """Replace and kill nodes, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=2, help="of a round; one more stands by")
    parser.add_argument("--events", type=int, default=50, help="replacements and kills")
    parser.add_argument("--seed", type=int, default=32)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, Coordinator(Path(name), session_ttl=3.0) as coordinator:
        folder = Path(name) / "job"
        folder.mkdir()
        with ReplaceableJob(folder, coordinator.endpoint, arguments.nodes) as job:
            replacing = Replacing(job, arguments.seed)
            replacing.events(arguments.events)
            job.finish()
            verdict = judge(folder)
    print(replacing.account)
    again = sum(verdict.again.values())
    print(
        f"{verdict.steps} steps, {again} trained again from the same state, wrong: {verdict.wrong or 'none'}"
    )


if __name__ == "__main__":
    main()

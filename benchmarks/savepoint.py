"""What a save point costs a training loop while nobody asks: ``python -m benchmarks.savepoint``."""

import statistics
import tempfile
import time
from pathlib import Path

from lab.processes.coordinator import Coordinator
from muster.worker import SavePoint

CALLS = 1_000
REPEATS = 200


def main() -> None:
    """Measure ``reached`` in a loop, with a real coordinator."""
    with tempfile.TemporaryDirectory() as folder, Coordinator(Path(folder)) as coordinator:
        point = SavePoint(rank=0, world_size=1, endpoint=coordinator.endpoint, run_id="job", generation=0)
        seconds = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            for step in range(CALLS):
                point.reached(step)
            seconds.append((time.perf_counter() - began) / CALLS)
        point.close()
    print(f"reached(), {REPEATS} times {CALLS} calls, the loop's own cost included:")
    print(f"  median {statistics.median(seconds) * 1e9:.0f} ns, slowest {max(seconds) * 1e9:.0f} ns")


if __name__ == "__main__":
    main()

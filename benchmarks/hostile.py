"""Hostile clients of every kind beside a job of 8 ranks that runs a barrier each 100 ms.

    python -m benchmarks.hostile --minutes 10

A coordinator on SQLite and a relay, both with TLS and tokens, as processes of their own. Ends with 1 if p99
of a decision or the memory of either process is beyond its bound, if anyone else was refused, or if a kind of
hostile client was not.
"""

import argparse
import logging
import sys
import tempfile
from pathlib import Path

from lab.hostile.attacks import ATTACKS, BY_NAME
from lab.hostile.soak import Account, run

MAX_P99_MS = 250.0
"""Of a decision: from the last arrival until the last rank has it."""
MAX_MEMORY_MIB = 400.0
"""``VmHWM`` of the coordinator, and of the relay."""


def missed(account: Account) -> list[str]:
    """The bounds that were not kept."""
    found = list(account.wrong)
    if not account.percentile(0.99) <= MAX_P99_MS:
        found.append(f"p99 of a decision was {account.percentile(0.99):.0f} ms, more than {MAX_P99_MS:.0f}")
    for name, memory in account.memory.items():
        if memory.peak > MAX_MEMORY_MIB:
            found.append(f"the {name} had {memory.peak:.0f} MiB, more than {MAX_MEMORY_MIB:.0f}")
    return found


def main() -> int:
    """Run it, and print what happened."""
    parser = argparse.ArgumentParser(description="A job beside hostile clients of every kind.")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--only", nargs="*", choices=sorted(BY_NAME), help="the kinds of hostile client")
    parser.add_argument("--folder", type=Path, help="an empty one, where all that is said is left")
    given = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    attacks = [attack for attack in ATTACKS if not given.only or attack.name in given.only]
    with tempfile.TemporaryDirectory(prefix="muster-hostile-") as temporary:
        folder = given.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        account = run(folder, lambda soak: soak.seconds >= given.minutes * 60, attacks)
    account.wrong = missed(account)
    print(account)
    return 1 if account.wrong else 0


if __name__ == "__main__":
    sys.exit(main())

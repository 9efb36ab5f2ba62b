"""One hostile client as a process: ``python -m …attacking NAME SOURCE TARGET ANSWERS BEGIN POLICY``.

NAME is of an attack, SOURCE the address of this machine that it comes from, TARGET a :class:`Target` in JSON,
POLICY the number of a scheduling policy. Once there is a file BEGIN it attacks in waves until it is killed.
Its answers so far are in the file ANSWERS, in JSON, from when it is ready.
"""

import asyncio
import json
import os
import sys
from contextlib import suppress
from pathlib import Path

from lab.hostile.attacker import Attacker, Target
from lab.hostile.attacks import BY_NAME, Attack
from lab.open_files import allow_many_files
from lab.patience import until
from lab.processes.proxy import Proxy

REPORT_INTERVAL = 0.2
"""Seconds between two reports."""


async def report(attacker: Attacker, path: Path) -> None:
    """Write the answers down, whole, again and again."""
    fresh = path.with_suffix(".fresh")
    while True:
        fresh.write_text(json.dumps(attacker.answers))
        fresh.replace(path)
        await asyncio.sleep(REPORT_INTERVAL)


async def attack_in_waves(attack: Attack, attacker: Attacker, answers: Path) -> None:
    """Attack until the process is killed; what fails in a wave of itself ends the process."""
    reporting = asyncio.create_task(report(attacker, answers))
    while not reporting.done():
        with suppress(OSError):  # It was not let in.
            await attack.act(attacker)
        await asyncio.sleep(attack.pause)


def main(name: str, source: str, target: str, answers: str, begin: str, policy: str) -> None:
    """Attack."""
    os.sched_setscheduler(0, int(policy), os.sched_param(0))
    allow_many_files()
    attacked = Target(**json.loads(target))
    with Proxy(attacked.port, source) as proxy:
        attacker = Attacker(attacked, proxy.endpoint, source)
        Path(answers).write_text("{}")
        until(Path(begin).exists, "the attacks do not begin")
        asyncio.run(attack_in_waves(BY_NAME[name], attacker, Path(answers)))


if __name__ == "__main__":
    main(*sys.argv[1:])

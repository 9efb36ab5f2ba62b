"""The source against an API with given answers."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from lab.watching.kubernetes_api import node
from muster.watcher.notice import Notice
from muster.watcher.sources.kubernetes import Kubernetes

AT, LATER, LAST = "2026-11-25T10:00:00Z", "2026-11-25T10:02:00Z", "2026-11-25T10:03:00Z"


class Answers:
    """One node, and what it becomes."""

    def __init__(self, *nodes: dict[str, Any]) -> None:
        self._nodes = nodes
        self.over = asyncio.Event()

    async def get(self, path: str, query: Mapping[str, str] | None = None) -> dict[str, Any]:
        return {"metadata": {"resourceVersion": "1"}, "items": [self._nodes[0]]}

    async def watch(
        self, path: str, query: Mapping[str, str], seconds: int
    ) -> AsyncGenerator[dict[str, Any], None]:
        for one in self._nodes[1:]:
            yield {"type": "MODIFIED", "object": one}
        self.over.set()
        await asyncio.Event().wait()


async def reports(*nodes: dict[str, Any]) -> list[list[Notice]]:
    """What the source reports while a node changes."""
    seen: list[list[Notice]] = []
    answers = Answers(*nodes)
    watching = asyncio.create_task(Kubernetes(answers, "node-1").watch(lambda found: seen.append([*found])))
    await answers.over.wait()
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    return seen


def changed_at(time: str, *, cordoned: bool = True) -> dict[str, Any]:
    """A node of which one manager sets annotations, and cordons it."""
    changed = node(spec={"unschedulable": cordoned})
    fields: dict[str, Any] = {"f:metadata": {"f:annotations": {}}}
    if cordoned:
        fields["f:spec"] = {"f:unschedulable": {}}
    changed["metadata"]["managedFields"] = [{"manager": "kured", "time": time, "fieldsV1": fields}]
    return changed


async def test_cordon_stays_one_notice_when_its_manager_changes_another_field():
    before, after = await reports(changed_at(AT), changed_at(LATER))
    assert before == after
    assert len(after) == 1


async def test_second_cordon_is_another_notice():
    first, none, second = await reports(changed_at(AT), changed_at(LATER, cordoned=False), changed_at(LAST))
    assert none == []
    assert first != second

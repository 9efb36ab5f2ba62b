"""A collection against an API whose answers are given."""

import logging
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import pytest

from muster.watcher.kubernetes.api import KubernetesError
from muster.watcher.kubernetes.collection import MAX_BACKOFF, Collection
from muster.watcher.source import SourceError

PATH, QUERY = "/api/v1/nodes", {"fieldSelector": "metadata.name=node-1"}
GONE = KubernetesError("too old resource version", 410)


class Ended(Exception):
    """There are no more answers."""


def thing(name: str, version: int) -> dict[str, Any]:
    return {"metadata": {"uid": name, "resourceVersion": str(version)}}


def listed(version: int, *names: str) -> dict[str, Any]:
    return {"metadata": {"resourceVersion": str(version)}, "items": [thing(name, version) for name in names]}


def event(kind: str, name: str, version: int) -> dict[str, Any]:
    return {"type": kind, "object": thing(name, version)}


class Answers:
    """Gives answers in turn: a list of events is a watch, in which an error ends it."""

    def __init__(self, *answers: Any) -> None:
        self._answers = list(answers)
        self.asked: list[str] = []

    def _next(self) -> Any:
        if not self._answers:
            raise Ended
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def get(self, path: str, query: Mapping[str, str] | None = None) -> dict[str, Any]:
        assert (path, query) == (PATH, QUERY)
        self.asked.append("list")
        answer: dict[str, Any] = self._next()
        return answer

    async def watch(
        self, path: str, query: Mapping[str, str], seconds: int
    ) -> AsyncGenerator[dict[str, Any], None]:
        assert query.items() >= QUERY.items()
        assert seconds > 0
        self.asked.append(f"watch {query['resourceVersion']}")
        for one in self._next():
            if isinstance(one, Exception):
                raise one
            yield one


class Followed:
    """A collection that was followed until the answers ended.

    Args:
        answers: of the API.
    """

    def __init__(self, *answers: Any) -> None:
        self.api = Answers(*answers)
        self.seen: list[set[str]] = []
        self.pauses: list[float] = []
        self.collection: Collection[str] = Collection(
            self.api, PATH, QUERY, lambda one: one["metadata"]["uid"], self._changed, self._pause
        )

    def _changed(self) -> None:
        self.seen.append(set(self.collection.objects))

    async def _pause(self, seconds: float) -> None:
        self.pauses.append(seconds)

    async def run(self) -> "Followed":
        with pytest.raises(Ended):
            await self.collection.follow()
        return self


async def test_objects_are_listed_and_then_watched():
    events = [event("ADDED", "b", 6), event("MODIFIED", "a", 7), event("DELETED", "a", 8)]
    followed = await Followed(listed(5, "a"), events).run()
    assert followed.seen == [{"a"}, {"a", "b"}, {"a", "b"}, {"b"}]
    assert followed.api.asked == ["list", "watch 5", "watch 8"]
    assert followed.pauses == []


async def test_watch_goes_on_from_a_bookmark():
    bookmark = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "9"}}}
    followed = await Followed(listed(5, "a"), [bookmark]).run()
    assert followed.api.asked == ["list", "watch 5", "watch 9"]
    assert followed.seen == [{"a"}, {"a"}], "the source is known to work"


async def test_objects_are_listed_again_when_the_version_is_gone():
    followed = await Followed(listed(5, "a", "b"), [event("ADDED", "c", 6), GONE], listed(20, "c"), []).run()
    assert followed.api.asked[:4] == ["list", "watch 5", "list", "watch 20"]
    assert followed.seen[-1] == {"c"}, "what went meanwhile has gone"


async def test_objects_stay_known_while_the_server_is_away():
    away = KubernetesError("no route")
    followed = await Followed(listed(5, "a"), away, [away], [event("ADDED", "b", 6)]).run()
    assert followed.api.asked == ["list", "watch 5", "watch 5", "watch 5", "watch 6"]
    assert followed.seen == [{"a"}, {"a", "b"}]


async def test_pauses_grow_until_the_server_answers():
    away = KubernetesError("no route")
    followed = await Followed(*[away] * 12, listed(5), away, [event("ADDED", "b", 6)]).run()
    before, after = followed.pauses[:12], followed.pauses[12]
    assert before[0] <= 0.5
    assert MAX_BACKOFF / 2 <= before[-1] <= MAX_BACKOFF
    assert after <= 0.5


async def test_server_that_ends_watches_at_once_is_not_called_in_a_loop():
    followed = await Followed(listed(5, "a"), [], [], []).run()
    assert len(followed.pauses) == 3


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param([{"type": "ADDED"}], id="an event without an object"),
        pytest.param([{"type": "ADDED", "object": {"metadata": {}}}], id="an object without a uid"),
        pytest.param([["ADDED"]], id="no event"),
    ],
)
async def test_answer_of_another_shape_is_a_failure(broken: list[Any]):
    followed = await Followed({"items": [{}]}, listed(5, "a"), broken, [event("ADDED", "b", 6)]).run()
    assert followed.api.asked == ["list", "list", "watch 5", "watch 5", "watch 6"]
    assert followed.seen == [{"a"}, {"a", "b"}]


@pytest.mark.parametrize("status", [401, 403])
async def test_missing_permission_ends_the_source(status: int):
    followed = Followed(KubernetesError("nodes is forbidden", status))
    with pytest.raises(SourceError, match="nodes is forbidden"):
        await followed.collection.follow()


async def test_permission_that_is_lost_later_may_come_back():
    followed = await Followed(listed(5, "a"), KubernetesError("nodes is forbidden", 403), []).run()
    assert followed.api.asked[:3] == ["list", "watch 5", "watch 5"]


async def test_failure_is_logged_once(caplog: pytest.LogCaptureFixture):
    away = KubernetesError("no route")
    with caplog.at_level(logging.INFO):
        await Followed(away, away, listed(5), []).run()
    assert [record.getMessage() for record in caplog.records] == [
        f"source kubernetes ({PATH}): no route",
        f"source kubernetes ({PATH}) answers again",
    ]

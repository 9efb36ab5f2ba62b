"""The stacks page and its JSON view, over a real socket, with a made-up coordinator."""

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator, Sequence

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client import CollectorRegistry
from yarl import URL

from lab import scenes
from muster.service.core.vocabulary.effects import ProbeTarget
from muster.service.core.vocabulary.refusal import Reason, Refusal
from muster.service.insight import words
from muster.service.insight.inspector import ProcessAnswer
from muster.service.security.access import Access
from muster.service.security.grants import Grant, Role
from muster.service.security.tokens import Tokens
from muster.service.web import links, pages, stacks
from muster.service.web.access import guarded
from muster.service.web.site import build_site
from muster.service.web.status import MAX_ASKING_PAGES
from muster.v1.insight_pb2 import ChildOfSave, Frame, Report, Thread
from tests.unit.service.web.markup import Markup
from tests.unit.service.web.test_pages import HOSTILE

Client = TestClient[web.Request, web.Application]


class AskedScene(scenes.Scene):
    """Counts who is asked, and holds the answers back if asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[list[int]] = []
        self.under_way = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.refusal: Refusal | None = None

    async def ask(self, processes: Sequence[ProbeTarget]) -> list[ProcessAnswer]:
        self.asked.append([one.rank for one in processes])
        self.under_way.set()
        await self.may_answer.wait()
        if self.refusal is not None:
            raise self.refusal
        return await super().ask(processes)


@pytest.fixture
async def scene() -> AskedScene:
    return AskedScene()


@pytest.fixture
async def client(scene: AskedScene) -> AsyncIterator[Client]:
    async with TestClient(
        TestServer(build_site(CollectorRegistry, lambda: None, scene, scene.ask))
    ) as client:
        yield client


async def page(client: Client, path: str) -> Markup:
    answer = await client.get(path)
    assert (answer.status, answer.content_type) == (200, "text/html")
    return Markup(await answer.text())


def at(function: str, line: int, *more: Thread) -> Report:
    """Return the report of a process that called a library from its program."""
    inner = Frame(function=function, file="/torch/distributed_c10d.py", line=2810, library=True)
    program = Frame(function="step", file="train.py", line=line)
    return Report(
        threads=[Thread(name="MainThread", main=True, frames=[inner, program]), *more],
        since_arrival_ms=41_000,
    )


def sixteen(scene: scenes.Scene) -> scenes.Job:
    """Rank 5 is elsewhere than most, rank 11 says nothing."""
    job = scenes.Job(scene, "job1", 16)
    scene.says = {rank: at("all_reduce", 214) for rank in range(16) if rank != 11}
    scene.says[5] = at("read", 9)
    return job


async def test_most_frequent_place_is_first_and_differing_ranks_are_named(client: Client, scene: AskedScene):
    sixteen(scene)
    text = (await page(client, "/runs/job1/stacks")).text
    assert "1 differs from the crowd: rank 5 Answered 15 of 16" in text
    crowd = "14 ranks: 0-4, 6-10, 12-15 main thread in all_reduce, train.py:214"
    other = "rank 5 (node-0, pid 4105) main thread in read, train.py:9 last arrived 41s ago"
    assert text.index(crowd) < text.index(other)
    assert f"Without an answer rank 11 (node-1, pid 4111): {words.NO_ANSWER}" in text


async def test_frames_are_shown_innermost_first_and_library_frames_are_marked(
    client: Client, scene: AskedScene
):
    sixteen(scene)
    shown = await page(client, "/runs/job1/stacks?rank=0")
    assert (
        "main thread Function Line all_reduce /torch/distributed_c10d.py :2810 step train.py :214"
        in shown.text
    )
    assert list(shown.of("class")).count("library") == 1


async def test_a_single_process_is_shown_with_its_threads_and_what_it_says_of_itself(
    client: Client, scene: AskedScene
):
    scenes.Job(scene, "job1", 8)
    loader = Thread(name="loader", frames=[Frame(function="get", file="queue.py", line=7)], frames_left_out=3)
    said = at("wait", 1, loader, Thread(name="ended"))
    said.threads_left_out = 2
    said.saves.append(ChildOfSave(pid=4200, state="D"))
    scene.says = {3: said}
    shown = await page(client, "/runs/job1/stacks?rank=3")
    assert "last arrived 41s ago; save child 4200 waits for the disk" in shown.text
    assert (
        "thread loader Function Line get queue.py :7 and 3 more, further out and 2 more threads" in shown.text
    )
    assert "ended" not in shown.text
    details = [names for tag, *names in shown.skeleton if tag == "details"]
    assert details == [["open"], []], "the main thread is shown at once"


async def test_only_the_requested_ranks_are_asked(client: Client, scene: AskedScene):
    job = sixteen(scene)
    job.join("a&b")
    job.meet("a&b", 0, without=(5, 11))
    shown = await page(client, "/runs/job1/stacks?rank=5&rank=3&rank=5")
    assert "Only ranks 3, 5" in shown.text
    assert "../../runs/job1/stacks.json?rank=3&rank=5" in shown.of("href")
    shown = await page(client, "/runs/job1/stacks?missing=a%26b")
    assert "Only the missing of a&b" in shown.text
    assert "../../runs/job1/stacks.json?missing=a%26b" in shown.of("href")
    await page(client, "/runs/job1/stacks?missing=a%26b&rank=5")
    assert scene.asked == [[3, 5], [5, 11], [5]]


async def test_the_page_of_a_run_leads_there(client: Client, scene: AskedScene):
    job = sixteen(scene)
    job.join("save/commit")
    job.meet("save/commit", 0, without=(5,))
    hrefs = {*(await page(client, "/runs/job1")).of("href")}
    assert {"../runs/job1/stacks", "../runs/job1/stacks?missing=save%2Fcommit"} <= hrefs
    assert scene.asked == [], "nobody is asked for that page"


async def test_it_does_not_renew_itself(client: Client, scene: AskedScene):
    sixteen(scene)
    shown = await page(client, "/runs/job1/stacks")
    assert "load it again to ask again" in shown.text
    refused = Markup(await (await client.get("/runs/not-yet/stacks")).text())
    for one in (shown, refused):
        assert "refresh" not in one.of("http-equiv")
        assert not any(tag in ("script", "noscript") for tag, *_ in one.skeleton)


async def test_json_view_has_the_fields_of_the_wire(client: Client, scene: AskedScene):
    sixteen(scene)
    answer = await client.get("/runs/job1/stacks.json")
    assert (answer.status, answer.content_type) == (200, "application/json")
    shown = await answer.json()
    assert set(shown) == {"taken_at", "crowds", "silent", "crowds_left_out"}
    assert [len(crowd["members"]) for crowd in shown["crowds"]] == [14, 1]
    assert shown["crowds"][1]["members"][0]["rank"] == 5
    assert shown["crowds"][0]["threads"][0]["frames"][0] == {
        "function": "all_reduce",
        "file": "/torch/distributed_c10d.py",
        "line": 2810,
        "library": True,
    }
    assert shown["silent"][0]["line"] == words.NO_ANSWER
    assert shown["crowds_left_out"] == 0


async def test_where_nobody_can_be_asked_that_is_said(client: Client, scene: AskedScene):
    job = scenes.Job(scene, "job1", 2)
    assert "None has answered." in (await page(client, "/runs/job1/stacks")).text
    job.join("p")
    job.meet("p", 0, without=(1,))
    assert "No such process can be asked" in (await page(client, "/runs/job1/stacks?missing=p&rank=0")).text
    scenes.Job(scene, "job2", 8, absent=range(8))
    assert "No process can be asked." in (await page(client, "/runs/job2/stacks")).text


@pytest.mark.parametrize(
    "run_id", ["a/b", "..", "a.json", "a/stacks", "stacks", "<script>", "\"'&", "%2e%2e"]
)
async def test_it_is_found_for_a_run_of_any_name(client: Client, scene: AskedScene, run_id: str):
    scenes.Job(scene, run_id, 1)
    shown = await client.get(URL(f"/{links.stacks_page(run_id)}", encoded=True))
    assert (shown.status, run_id in Markup(await shown.text()).text) == (200, True)
    document = await client.get(URL(f"/{links.stacks_json(run_id, (), '')}", encoded=True))
    assert (await document.json())["silent"][0]["members"][0]["rank"] == 0


async def test_links_lead_somewhere(client: Client, scene: AskedScene):
    job = sixteen(scene)
    job.join("a b")
    job.meet("a b", 0, without=(5,))
    path = "/runs/job1/stacks?rank=5&missing=a%20b"
    for value in (shown := await page(client, path)).of("href"):
        target = client.make_url(path).join(URL(value, encoded=True))
        assert (await client.get(target.relative())).status == 200
    assert "../../runs/job1" in shown.of("href")


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("path", "status", "reason"),
    [
        ("/runs/%3Cb%3E/stacks", 404, "RUN_NOT_FOUND"),
        ("/runs/job1/stacks?rank=99", 404, "MEMBER_NOT_FOUND"),
        ("/runs/job1/stacks?missing=nothing", 404, "BARRIER_NOT_FOUND"),
        ("/runs/job1/stacks?missing=over", 404, "NO_OPEN_BARRIER"),
        ("/runs/job1/stacks?rank=%3Cb%3E", 400, "INVALID_ARGUMENT"),
        ("/runs/job1/stacks?rank=-1", 400, "INVALID_ARGUMENT"),
        ("/runs/job1/stacks?rank=%D9%A3", 400, "INVALID_ARGUMENT"),
        ("/runs/job1/stacks?rank=", 400, "INVALID_ARGUMENT"),
        (f"/runs/job1/stacks?rank={'9' * 5000}", 400, "INVALID_ARGUMENT"),
        ("/runs/job1/stacks?missing=", 400, "INVALID_ARGUMENT"),
    ],
)
async def test_invalid_stacks_request_is_answered_with_a_status_and_a_reason(
    client: Client, scene: AskedScene, path: str, status: int, reason: str
):
    job = sixteen(scene)
    job.join("over")
    job.meet("over", 0)
    answer = await client.get(URL(path, encoded=True))
    assert (answer.status, reason in Markup(await answer.text()).text) == (status, True)
    answer = await client.get(URL(path.replace("/stacks", "/stacks.json"), encoded=True))
    assert (answer.status, (await answer.json())["error"]["reason"]) == (status, reason)
    assert scene.asked == []


async def test_stacks_request_beyond_the_limit_is_answered_with_429(client: Client, scene: AskedScene):
    sixteen(scene)
    scene.refusal = Refusal(Reason.LIMIT_EXCEEDED, "ask again soon")
    answer = await client.get("/runs/job1/stacks")
    assert (answer.status, "ask again soon" in await answer.text()) == (429, True)


async def test_many_viewers_ask_once_and_nobody_else_waits_for_them(client: Client, scene: AskedScene):
    sixteen(scene)
    scene.may_answer.clear()
    viewers = [asyncio.create_task(client.get("/runs/job1/stacks")) for _ in range(20)]
    await scene.under_way.wait()
    for path in ("/", "/runs/job1"):
        assert (await client.get(path)).status == 200
    scene.may_answer.set()
    assert {(await viewer).status for viewer in viewers} == {200}
    assert len(scene.asked) == 1


async def test_only_so_many_are_under_way_at_once(client: Client, scene: AskedScene):
    sixteen(scene)
    scene.may_answer.clear()
    viewers = []
    for rank in range(MAX_ASKING_PAGES):
        scene.under_way.clear()
        viewers.append(asyncio.create_task(client.get(f"/runs/job1/stacks?rank={rank}")))
        await scene.under_way.wait()
    answer = await client.get("/runs/job1/stacks.json?rank=9")
    refusal = (await answer.json())["error"]
    assert (answer.status, refusal["reason"]) == (429, "LIMIT_EXCEEDED")
    assert "max_inspecting_pages" in refusal["message"]
    scene.may_answer.set()
    assert {(await viewer).status for viewer in viewers} == {200}
    assert (await client.get("/runs/job1/stacks?rank=8")).status == 200


async def test_a_coordinator_that_retires_meanwhile_tells_nothing(client: Client, scene: AskedScene):
    sixteen(scene)
    scene.may_answer.clear()
    looking = asyncio.create_task(client.get("/runs/job1/stacks"))
    await scene.under_way.wait()
    scene.retired = True
    scene.may_answer.set()
    assert (await looking).status == 503


async def test_it_is_for_operators_of_the_run(scene: AskedScene):
    sixteen(scene)
    secrets = {
        (role, runs): f"s3cr3t-{role.name}-{runs}-0123456789" for role in Role for runs in ("*", "b-*")
    }
    grants = tuple(
        Grant(name=f"{role.name}", role=role, runs=(runs,), digest=hashlib.sha256(secret.encode()).digest())
        for (role, runs), secret in secrets.items()
    )
    site = build_site(CollectorRegistry, lambda: None, scene, scene.ask)
    site.middlewares.append(
        guarded(Access(lambda: Tokens(grants)), needs_certificate=False, knows_operators=True)
    )
    async with TestClient(TestServer(site)) as client:
        for path in ("/runs/job1/stacks", "/runs/job1/stacks.json", "/runs/job1.html/stacks"):
            assert (await client.get(path)).status == 401
            for (role, runs), secret in secrets.items():
                answer = await client.get(path, headers={"Authorization": f"Bearer {secret}"})
                allowed = role is Role.OPERATOR and runs == "*"
                assert answer.status == (200 if allowed else 403)
                if role is not Role.OPERATOR:
                    assert (
                        f"has the role {role.name.lower()}, and {path} needs operator" in await answer.text()
                    )
        viewer = {"Authorization": f"Bearer {secrets[Role.VIEWER, '*']}"}
        shown = await client.get("/runs/job1", headers=viewer)
        assert "../runs/job1/stacks" in Markup(await shown.text()).of("href"), "it is shown plainly"
    assert scene.asked == [list(range(16))] * 2, "the page, by either of its paths, and its JSON view"


# ---------------------------------------------------------------------- hostile processes


def word_everywhere(word: str) -> Report:
    frames = [Frame(function=word, file=word, line=1), Frame(function=word, file=word, line=-1, library=True)]
    return Report(
        threads=[Thread(name=word, main=True, frames=frames), Thread(name=word, frames=frames)],
        waits_at=[word, word],
        saves=[ChildOfSave(pid=-1, state=word)],
    )


def folded(*reports: Report | None, word: str = "w") -> stacks.StacksData:
    """Build the data of a page from answers; None stands for a silent process."""
    sightings = [
        ProcessAnswer(
            ProbeTarget(1, rank, "life", word, rank, relayed=False), said, "" if said else words.NO_ANSWER
        )
        for rank, said in enumerate(reports)
    ]
    return stacks.build_stacks(1e9, stacks.StackQuery(word, (1,), word), sightings)


def both(word: str) -> list[str]:
    """The pages of a process alone, and of one beside another that says nothing."""
    report = word_everywhere(word)
    looks = folded(report, word=word), folded(report, None, word=word)
    return [pages.stacks_page(look, "../../") for look in looks]


@pytest.mark.parametrize("word", HOSTILE)
def test_text_from_a_process_adds_no_markup(word: str):
    for hostile, benign in zip(both(word), both("w"), strict=True):
        shown, expected = Markup(hostile), Markup(benign)
        assert shown.skeleton == expected.skeleton
        assert all(char.isprintable() or char == "\n" for char in hostile), "a control is not visible"
        for name in ("href", "src"):
            assert all(re.fullmatch(r"[\w./%~?=&-]*", value, re.ASCII) for value in shown.of(name))
        assert list(shown.of("class")) == list(expected.of("class"))


def test_text_from_a_process_is_shown_readably():
    alone, beside = (Markup(page).text for page in both("<b>\x1b[31m"))
    assert "thread <b>\\x1b[31m Function Line <b>\\x1b[31m <b>\\x1b[31m :1" in alone
    assert f"rank 1 (<b>\\x1b[31m, pid 1): {words.NO_ANSWER}" in beside


def test_a_page_has_a_bound_however_many_stand_elsewhere():
    reports = [
        Report(threads=[Thread(main=True, frames=[Frame(function=f"f{rank}")], frames_left_out=2**32 - 1)])
        for rank in range(stacks.MAX_CROWDS + 3)
    ]
    shown = pages.stacks_page(folded(*reports), "../../")
    assert "and 3 more: muster stack w" in Markup(shown).text
    assert shown.count("<details") == stacks.MAX_CROWDS
    assert f"and {2**32 - 1} more, further out" in shown


def test_a_name_has_a_bound():
    (crowd,) = folded(word_everywhere("<" * (stacks.MAX_NAME + 1))).response.crowds
    said = crowd.members[0].report
    named = [*said.waits_at, *(child.state for child in said.saves)]
    for thread in crowd.threads:
        named += [thread.name, *(name for frame in thread.frames for name in (frame.function, frame.file))]
    assert named == ["<" * stacks.MAX_NAME + "…"] * 13

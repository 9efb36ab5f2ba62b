"""The status page of a real coordinator, in a real browser."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Request, expect

from lab.patience import PATIENCE
from lab.processes.browser import chromium
from lab.processes.command import output
from lab.processes.coordinator import Coordinator
from tests.support.world.multirank_client import MultirankClient

WIDTHS = (360, 1280)
FOLD_WINDOW_MS = 1_000 * PATIENCE
HOSTILE = "job/../<script>alert('x')</script>\"'&%2e%2f?#\\" + "ש" * 20 + ".json"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    expect.set_options(timeout=FOLD_WINDOW_MS)
    with chromium() as browser:
        yield browser


@contextmanager
def a_page(browser: Browser, width: int, **options: Any) -> Iterator[Page]:
    """A page that has nothing to complain about: no error, nothing that its policy forbids."""
    complaints: list[str] = []

    def said(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            complaints.append(message.text)

    def failed(request: Request) -> None:
        # A look that the next page cuts short is no failure.
        if request.failure != "net::ERR_ABORTED":
            complaints.append(f"{request.url} {request.failure}")

    context: BrowserContext = browser.new_context(viewport={"width": width, "height": 800}, **options)
    try:
        page = context.new_page()
        page.set_default_timeout(FOLD_WINDOW_MS)
        page.on("console", said)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("requestfailed", failed)
        yield page
        assert complaints == []
    finally:
        context.close()


def url(coordinator: Coordinator, path: str) -> str:
    return f"http://127.0.0.1:{coordinator.http_port}{path}"


def assert_it_fits(page: Page) -> None:
    """Once its style sheet is there: on a loaded machine it comes after the page."""
    page.wait_for_function("document.documentElement.scrollWidth <= innerWidth")


def texts(page: Page, selector: str) -> list[str]:
    return [" ".join(text.split()) for text in page.locator(selector).all_inner_texts()]


@pytest.mark.parametrize("width", WIDTHS)
def test_sixteen_ranks_of_which_two_are_missing(coordinator: Coordinator, browser: Browser, width: int):
    here = [rank for rank in range(16) if rank not in (6, 11)]
    with MultirankClient(coordinator.endpoint, "job1", range(16), 16) as job, a_page(browser, width) as page:
        job.join("save")
        job.arrive("save", 0, here)

        page.goto(url(coordinator, "/"))
        waiting = page.locator("#open li").first
        expect(waiting).to_contain_text("14 of 16")
        expect(page.locator("#open progress")).to_have_js_property("value", 14)
        assert texts(page, "#open .missing li") == [
            "rank 6 (gpu-0000, pid 4106, connected, not arrived yet)",
            "rank 11 (gpu-0001, pid 4111, connected, not arrived yet)",
        ]
        assert_it_fits(page)

        page.get_by_role("link", name="job1").first.click()
        expect(page.get_by_role("heading", level=1)).to_contain_text("job1")
        expect(page.locator("#open .tag")).to_have_text("save: writes")
        assert page.locator("#open tbody tr").count() == 2
        assert_it_fits(page)

        page.evaluate("window.untouched = true")
        page.locator("#there > summary").click()
        was_open = page.locator("#there").evaluate("it => it.open")
        job.arrive("save", 0, (6, 11))
        expect(page.locator("#decided .released")).to_be_visible()
        expect(page.locator("#open")).to_contain_text("No barrier is open")
        expect(page.locator("#decided")).to_contain_text("was released: 16 of 16 arrived")
        assert page.evaluate("window.untouched"), "it was loaded again"
        assert page.locator("#there").evaluate("it => it.open") == was_open
        assert_it_fits(page)


@pytest.mark.parametrize("width", WIDTHS)
def test_four_thousand_ranks_are_readable(coordinator: Coordinator, browser: Browser, width: int):
    ranks = 4_096
    with (
        MultirankClient(coordinator.endpoint, "big", range(ranks - 8), ranks) as job,
        a_page(browser, width) as page,
    ):
        job.join("checkpoint")
        job.arrive("checkpoint", 0, [rank for rank in range(1_000, ranks - 8) if rank % 97])
        page.goto(url(coordinator, "/"))
        expect(page.locator("#runs")).to_contain_text("4088 of 4088")
        assert_it_fits(page)
        page.goto(url(coordinator, "/runs/big"))
        expect(page.locator("#open progress")).to_have_js_property("value", 3_056)
        never, connected = texts(page, "#open p.kind, #open summary")
        assert never == "8 never joined: ranks 4088-4095"
        assert connected.startswith("1032 connected, not arrived: ranks 0-999, 1067, 1164,")
        assert connected.endswith("on 157 hosts")
        assert_it_fits(page)

        # All of them are there to be seen, and stay so while the page renews itself.
        page.locator("#open summary").last.click()
        hosts = page.locator("#open details[open]").last.locator("tbody tr")
        assert hosts.count() == 157
        expect(hosts.first).to_contain_text("4100-4107")
        page.locator("#there > summary").click()
        assert_it_fits(page)
        page.mouse.wheel(0, 3_000)
        page.wait_for_function("scrollY > 0")
        before = page.evaluate("scrollY")
        job.arrive("checkpoint", 0, (5,), failure="the disk is full")
        expect(page.locator("#decided .aborted")).to_be_attached()
        expect(page.locator("#decided")).to_contain_text(
            "rank 5 (gpu-0000, pid 4105) failed: the disk is full"
        )
        assert page.locator("#there").evaluate("it => it.open")
        assert page.evaluate("scrollY") > 0, f"it was at {before}"
        assert_it_fits(page)


def test_it_can_be_read_without_javascript(coordinator: Coordinator, browser: Browser):
    with (
        MultirankClient(coordinator.endpoint, "job1", range(15), 16) as job,
        a_page(browser, 1280, java_script_enabled=False) as page,
    ):
        job.join("checkpoint")
        job.arrive("checkpoint", 0, range(15))
        job.close_run("ann@desk", "the budget is spent")
        page.goto(url(coordinator, "/runs/job1"))
        assert page.locator("#link noscript").inner_html() == "Loads again every 5 s"
        assert page.locator("head noscript meta[http-equiv=refresh]").get_attribute("content") == "5"
        assert texts(page, "#open tbody tr") == ["– 15 – never joined"]
        expect(page.locator(".notice")).to_contain_text("Closed by ann@desk")
        expect(page.locator(".notice")).to_contain_text("the budget is spent")
        page.get_by_role("link", name="Muster").first.click()
        expect(page.locator("#runs tbody th")).to_have_text("job1")


@pytest.mark.parametrize("run_id", [HOSTILE, "..", ".", "a.json", "/", "%2e%2e", "x" * 256])
def test_a_run_may_have_any_name(coordinator: Coordinator, browser: Browser, run_id: str):
    with (
        MultirankClient(coordinator.endpoint, run_id, range(8), 8) as job,
        a_page(browser, 360) as page,
    ):
        job.join(run_id[:200])
        job.arrive(run_id[:200], 0, (0,), failure=f"<b>{run_id}\x1b[31m</b>\u202e")
        page.goto(url(coordinator, "/"))
        page.locator("#runs a").first.click()
        expect(page.get_by_role("heading", level=1).locator(".name")).to_have_text(run_id)
        expect(page.locator("#decided")).to_contain_text("<b>")
        expect(page.locator("#decided")).to_contain_text("\\x1b[31m</b>\\u202e")
        assert_it_fits(page)
        twin = page.locator("footer a").first.evaluate("it => it.href")
        with page.expect_response(twin) as answered:
            page.goto(twin)
        assert answered.value.json()["run"]["run_id"] == run_id


def test_it_says_when_the_coordinator_cannot_be_reached(coordinator: Coordinator, browser: Browser):
    context = browser.new_context()
    try:
        page = context.new_page()
        page.goto(url(coordinator, "/"))
        expect(page.get_by_role("status")).to_have_text("Live")
        coordinator.kill()
        expect(page.get_by_role("status")).to_contain_text("cannot be reached")
        expect(page.get_by_role("heading", level=1)).to_be_visible()
        coordinator.start()
        expect(page.get_by_role("status")).to_have_text("Live")
    finally:
        context.close()


def test_the_twin_of_a_run_is_what_the_command_prints(coordinator: Coordinator):
    with MultirankClient(coordinator.endpoint, "job1", range(16), 16) as job:
        job.join("checkpoint")
        job.arrive("checkpoint", 0, range(16))
        job.hear("decision")
        printed = json.loads(output(coordinator.endpoint, "describe", "run", "job1", "-o", "json"))
        status, text = coordinator.get("/runs/job1.json")
        shown = json.loads(text)
    assert status == 200
    assert shown.pop("taken_at").endswith("Z")
    for one in (*printed["members"], *shown["members"]):
        del one["since_ms"]
    assert shown == printed

"""The client of metadata servers: in time, not too much, from there and from nowhere else."""

import pytest

from lab.processes.coordinator import free_port
from lab.watching.metadata import FakeAzure, answers, hangs, huge, trickles, truncated
from muster.watcher.polling import LookError
from muster.watcher.sources.metadata import Answer, MetadataServer

HEADERS = {"Metadata": "true"}
PATH = "/metadata/scheduledevents?api-version=2020-07-01"


async def ask(server: FakeAzure, limit: float = 5.0) -> Answer:
    return await MetadataServer(server.base).get(PATH, HEADERS, limit=limit)


async def test_answer_comes_by_itself_whatever_the_proxy(monkeypatch: pytest.MonkeyPatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with FakeAzure() as azure:
        answer = await ask(azure)
        assert (answer.status, answer.found()) == (200, True)


async def test_redirect_is_not_followed():
    with FakeAzure() as azure, FakeAzure() as elsewhere:
        azure.faults[azure.EVENTS] = answers(302, Location=f"{elsewhere.base}{PATH}")
        with pytest.raises(LookError, match=r"answers 302\."):
            (await ask(azure)).found()
        assert elsewhere.asked == []


@pytest.mark.parametrize("fault", [hangs, trickles])
async def test_slow_answer_is_given_up(fault):
    with FakeAzure() as azure:
        azure.faults[azure.EVENTS] = fault
        with pytest.raises(LookError, match=r"did not answer within 0\.2 s"):
            await ask(azure, 0.2)


@pytest.mark.parametrize(
    ("fault", "message"), [(huge, "more than 65,536 bytes"), (truncated, "cannot be read")]
)
async def test_answer_of_another_size_is_refused(fault, message: str):
    with FakeAzure() as azure:
        azure.faults[azure.EVENTS] = fault
        with pytest.raises(LookError, match=message):
            await ask(azure)


async def test_compressed_answer_stays_compressed():
    with FakeAzure() as azure:
        azure.faults[azure.EVENTS] = answers(200, "not compressed at all", **{"Content-Encoding": "gzip"})
        assert (await ask(azure)).body == b"not compressed at all"


@pytest.mark.parametrize("base", ["http://127.0.0.1:{port}", "http://[::1]:{port}"])
async def test_server_that_is_not_there_is_named(base: str):
    address = base.format(port=free_port())
    with pytest.raises(LookError) as caught:
        await MetadataServer(address).get(PATH, HEADERS)
    assert str(caught.value).startswith(f"{address}{PATH} cannot be reached: ")


@pytest.mark.parametrize("base", ["http://", "nonsense", "file:///etc", "http://[::1", "http://a b"])
async def test_address_that_is_none_is_named(base: str):
    with pytest.raises(LookError, match="cannot be re"):
        await MetadataServer(base).get(PATH, HEADERS)

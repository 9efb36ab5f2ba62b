"""Sources by name, with the options of ``muster watch``."""

from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from lab.watching.metadata import FakeAws, FakeAzure, FakeGoogle, FakeMetadataServer
from muster.watcher.notice import Notice
from muster.watcher.polling import LookError, Polled
from muster.watcher.sources.registry import SOURCES, SourceOptions, open_source

POLLED = [name for name in SOURCES if name != "kubernetes"]


async def opened(name: str, options: SourceOptions) -> Polled:
    async with AsyncExitStack() as stack:
        source = await open_source(name, options, stack)
    assert isinstance(source, Polled)
    return source


class Enough(Exception):
    """Ends a source that polls without end."""


async def first_report(source: Polled) -> list[Notice]:
    found: list[Notice] = []

    async def pause(_: float) -> None:
        raise Enough

    source._pause = pause
    with pytest.raises(Enough):
        await source.watch(found.extend)
    return found


@pytest.mark.parametrize(
    ("name", "interval"), [("aws", 5.0), ("google", 2.0), ("azure", 2.0), ("slurm", 30.0)]
)
async def test_source_polls_at_its_own_pace_unless_one_is_given(name: str, interval: float):
    assert (await opened(name, SourceOptions(node_name="n1")))._interval == interval
    assert (await opened(name, SourceOptions(node_name="n1", interval=0.5)))._interval == 0.5


@pytest.mark.parametrize("name", POLLED)
async def test_source_takes_the_options_of_the_others(name: str):
    options = SourceOptions(node_name="n1", metadata_url="http://127.0.0.1:1", lead=1.0, slurm_nodes="n[1-2]")
    assert (await opened(name, options)).name == name


@pytest.mark.parametrize(("name", "make"), [("aws", FakeAws), ("google", FakeGoogle), ("azure", FakeAzure)])
async def test_lead_decides_when_an_announced_event_counts(name: str, make: type[FakeMetadataServer]):
    with make() as server:
        match server:
            case FakeAws() | FakeAzure():
                server.schedule("Reboot", seconds=300)
            case FakeGoogle():
                server.announce_maintenance(seconds=300)
        options = SourceOptions(node_name="n1", metadata_url=server.base)
        assert len(await first_report(await opened(name, options))) == 1
        assert await first_report(await opened(name, replace(options, lead=60.0))) == []


async def test_several_nodes_of_slurm_are_asked_for_together(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    source = await opened("slurm", SourceOptions(node_name="n1", slurm_nodes="n[1-2]"))
    with pytest.raises(LookError, match="scontrol cannot be started"):
        await source._look()

"""RunService: runs and members, for people and their tools."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

from muster.service.core import views
from muster.service.core.effects import Evicted, RunForgotten, SaveRequested
from muster.service.core.events import CancelSave, Evict, Forget, RequestSave
from muster.service.draining import DRAINING
from muster.service.driver import Driver
from muster.service.rpc.call import Call
from muster.service.wire import barrier_names_to_pb, members_to_pb, run_to_pb, save_to_pb
from muster.v1 import run_pb2, run_pb2_grpc

WATCH_INTERVAL = 0.2
"""Seconds between two looks of a Watch, so that a busy coordinator is not slowed by its watchers."""


class RunServicer(run_pb2_grpc.RunServiceServicer):
    """Serves ``muster.v1.RunService``."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    async def List(  # noqa: N802
        self, request: run_pb2.RunServiceListRequest, context: Any
    ) -> run_pb2.RunServiceListResponse:
        """Show every run."""
        found = await self._driver.query(views.runs)
        return run_pb2.RunServiceListResponse(runs=[run_to_pb(view) for view in found])

    async def Get(  # noqa: N802
        self, request: run_pb2.RunServiceGetRequest, context: Any
    ) -> run_pb2.RunServiceGetResponse:
        """Show one run."""
        view = await self._driver.query(lambda core, now: views.run(core.run(request.run_id), now))
        return run_pb2.RunServiceGetResponse(run=run_to_pb(view))

    async def Members(  # noqa: N802
        self, request: run_pb2.MembersRequest, context: Any
    ) -> run_pb2.MembersResponse:
        """Show the processes of a run."""
        found = await self._driver.query(lambda core, now: views.members(core.run(request.run_id), now))
        return run_pb2.MembersResponse(members=members_to_pb(found))

    async def Evict(  # noqa: N802
        self, request: run_pb2.EvictRequest, context: Any
    ) -> run_pb2.EvictResponse:
        """Send the processes of a rank away, or say who would be affected."""
        affected = await self._driver.query(
            lambda core, now: views.eviction(core.run(request.run_id), request.rank, now)
        )
        if not request.dry_run:
            with Call(self._driver, Evicted) as call:
                self._driver.submit(Evict(call.id, request.run_id, request.rank, request.reason))
                await call.answer()
        return run_pb2.EvictResponse(
            members=members_to_pb(affected.members),
            failed_barriers=barrier_names_to_pb(affected.failed_barriers),
        )

    async def Forget(  # noqa: N802
        self, request: run_pb2.ForgetRequest, context: Any
    ) -> run_pb2.ForgetResponse:
        """Remove a run, or say who would be affected."""
        affected = await self._driver.query(
            lambda core, now: views.forgetting(core, request.run_id, now, force=request.force)
        )
        if not request.dry_run:
            with Call(self._driver, RunForgotten) as call:
                self._driver.submit(Forget(call.id, request.run_id, request.force))
                await call.answer()
        return run_pb2.ForgetResponse(
            processes=affected.processes,
            nodes=affected.nodes,
            open_barriers=barrier_names_to_pb(affected.open_barriers),
            waiting_calls=affected.waiting_calls,
        )

    async def RequestSave(  # noqa: N802
        self, request: run_pb2.RequestSaveRequest, context: Any
    ) -> run_pb2.RequestSaveResponse:
        """Ask all ranks of a run to save at one step."""
        with Call(self._driver, SaveRequested) as call:
            known = request.known_number if request.HasField("known_number") else None
            asked = RequestSave(call.id, request.run_id, request.stop, request.by, request.reason, known)
            self._driver.submit(asked)
            answer = await call.answer()
        return run_pb2.RequestSaveResponse(save=save_to_pb(answer.save), was_asked=answer.was_asked)

    async def CancelSave(  # noqa: N802
        self, request: run_pb2.CancelSaveRequest, context: Any
    ) -> run_pb2.CancelSaveResponse:
        """Withdraw that."""
        with Call(self._driver, SaveRequested) as call:
            self._driver.submit(CancelSave(call.id, request.run_id, request.reason))
            answer = await call.answer()
        return run_pb2.CancelSaveResponse(save=save_to_pb(answer.save))

    async def Watch(  # noqa: N802
        self, request: run_pb2.WatchRequest, context: Any
    ) -> AsyncIterator[run_pb2.WatchResponse]:
        """Show each run now, and again whenever its counts change."""
        shown: dict[str, views.RunView] = {}
        changed = self._driver.watch()
        try:
            while True:
                changed.clear()
                found = await self._driver.query(views.runs)
                for run_id in shown.keys() - {view.run_id for view in found}:
                    forgotten = run_to_pb(shown.pop(run_id))
                    forgotten.forgotten = True
                    yield run_pb2.WatchResponse(run=forgotten)
                for view in found:
                    wanted = request.run_id in ("", view.run_id)
                    # A store that is used and a job that trains change all the time, and nobody watches it.
                    counts = dataclasses.replace(view, store_keys=0, store_bytes=0, steps=None)
                    if (checkpoints := view.checkpoints) is not None:
                        still = dataclasses.replace(checkpoints, age=0.0, unsaved=None)
                        counts = dataclasses.replace(counts, checkpoints=still)
                    if wanted and shown.get(view.run_id) != counts:
                        shown[view.run_id] = counts
                        yield run_pb2.WatchResponse(run=run_to_pb(view))
                await asyncio.sleep(WATCH_INTERVAL)
                await changed.wait()
                if self._driver.retired:
                    raise DRAINING
        finally:
            self._driver.unwatch(changed)

"""RunService: runs and members, for people and their tools."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

from muster.service.core import views
from muster.service.core.coordinator import Coordinator
from muster.service.core.vocabulary.effects import Evicted, NodeDrained, RunForgotten, SaveRequested
from muster.service.core.vocabulary.events import CancelSave, DrainNode, Evict, Forget, RequestSave
from muster.service.core.vocabulary.model import Instant
from muster.service.core.vocabulary.refusal import Refusal, limit_exceeded
from muster.service.draining import DRAINING
from muster.service.driver import Driver
from muster.service.rpc.call import Call
from muster.service.rpc.interceptors.guard import ADMISSION
from muster.service.security.audit import CALL
from muster.service.snapshots import ALL, INTERVAL, Snapshot, Snapshots
from muster.service.wire import barrier_names_to_pb, members_to_pb, run_to_pb, save_to_pb
from muster.serving.connections import address_of
from muster.serving.counted import counted
from muster.v1 import run_pb2, run_pb2_grpc

MAX_WATCHES = 512
"""Open watches. Each reads the runs whenever something has changed."""
MAX_WATCHES_PER_CALLER = 64
"""Open watches of one token, or of one address if callers need no token."""


class RunServicer(run_pb2_grpc.RunServiceServicer):
    """Serves ``muster.v1.RunService``.

    Args:
        driver: knows the runs.
        snapshots: makes the views that all watches share.
    """

    def __init__(self, driver: Driver, snapshots: Snapshots) -> None:
        self._driver = driver
        self._snapshots = snapshots
        self._watches: Counter[str] = Counter()
        """Open watches, by caller."""

    async def List(  # noqa: N802
        self, request: run_pb2.RunServiceListRequest, context: Any
    ) -> run_pb2.RunServiceListResponse:
        """Show every run that the caller may see."""
        admission = ADMISSION.get()
        found = await self._driver.query(lambda core, now: views.runs(core, now, admission.shows))
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
        """Evict the processes of a rank, or show what that would affect."""
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
        """Remove a run, or show what that would affect."""
        affected = await self._driver.query(
            lambda core, now: views.removal(core, request.run_id, now, force=request.force)
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
            asked = RequestSave(
                call.id,
                request.run_id,
                request.stop,
                request.by,
                request.reason,
                known,
                request.across_generations,
                _seconds(request.deadline_ms),
                request.notice_id,
                request.generation if request.HasField("generation") else None,
            )
            self._driver.submit(asked)
            answer = await call.answer()
        return run_pb2.RequestSaveResponse(save=save_to_pb(answer.save), was_asked=answer.was_asked)

    async def DrainNode(  # noqa: N802
        self, request: run_pb2.DrainNodeRequest, context: Any
    ) -> run_pb2.DrainNodeResponse:
        """Ask each run that has a process or an agent on a node to save."""
        admission, node_name = ADMISSION.get(), request.node_name
        run_ids = await self._driver.query(
            lambda core, now: views.runs_on_node(core, node_name, admission.shows)
        )
        with Call(self._driver, NodeDrained) as call:
            drain = DrainNode(
                call.id,
                node_name,
                run_ids,
                request.stop,
                request.by,
                request.reason,
                _seconds(request.deadline_ms),
                request.notice_id,
                request.run_id,
            )
            self._driver.submit(drain)
            answer = await call.answer()
        if (audited := CALL.get()) is not None:
            audited.changed([one.run_id for one in answer.runs if not one.was_asked])
        return run_pb2.DrainNodeResponse(
            runs=[
                run_pb2.DrainedRun(run_id=one.run_id, save=save_to_pb(one.save), was_asked=one.was_asked)
                for one in answer.runs
            ]
        )

    async def CancelSave(  # noqa: N802
        self, request: run_pb2.CancelSaveRequest, context: Any
    ) -> run_pb2.CancelSaveResponse:
        """Withdraw the save that ranks were asked for."""
        with Call(self._driver, SaveRequested) as call:
            self._driver.submit(CancelSave(call.id, request.run_id, request.reason))
            answer = await call.answer()
        return run_pb2.CancelSaveResponse(save=save_to_pb(answer.save))

    async def Watch(  # noqa: N802
        self, request: run_pb2.WatchRequest, context: Any
    ) -> AsyncIterator[run_pb2.WatchResponse]:
        """Show each run now, and again whenever its counts change.

        Raises:
            Refusal: LIMIT_EXCEEDED: too many watches are open.
        """
        with self._counted(context):
            async for run in self._changes(request.run_id):
                yield run_pb2.WatchResponse(run=run)

    @contextmanager
    def _counted(self, context: Any) -> Iterator[None]:
        """Count a watch for as long as it is open."""
        caller, who = _caller(context)
        if self._watches[caller] >= MAX_WATCHES_PER_CALLER:
            raise _too_many(who, "max_watches_per_caller", MAX_WATCHES_PER_CALLER)
        if self._watches.total() >= MAX_WATCHES:
            raise _too_many("the coordinator", "max_watches", MAX_WATCHES)
        with counted(self._watches, caller):
            yield

    async def _changes(self, run_id: str) -> AsyncIterator[run_pb2.Run]:
        grant = ADMISSION.get().grant
        patterns = ALL if grant is None else grant.runs
        shown: dict[str, views.RunView] = {}
        changed = self._driver.watch()

        def look(core: Coordinator, now: Instant) -> Snapshot:
            if run_id:
                taken = self._snapshots.take_one(core, now, run_id)
            else:
                taken = self._snapshots.take(core, now, patterns)
            if taken.taken_at < now.monotonic:
                changed.set()  # The next query sees later changes.
            return taken

        try:
            while True:
                changed.clear()
                found = await self._driver.query(look)
                for forgotten in shown.keys() - {one.view.run_id for one in found.runs}:
                    gone = run_to_pb(shown.pop(forgotten))
                    gone.forgotten = True
                    yield gone
                for one in found.runs:
                    before = shown.get(one.view.run_id)
                    if before is not one.counts and before != one.counts:
                        shown[one.view.run_id] = one.counts
                        yield run_to_pb(one.view)
                await asyncio.sleep(INTERVAL)
                await changed.wait()
                if self._driver.retired:
                    raise DRAINING
        finally:
            self._driver.unwatch(changed)


def _seconds(milliseconds: int) -> float | None:
    """Return a time in seconds; None for 0, which means that none was given."""
    return milliseconds / 1000 if milliseconds else None


def _caller(context: Any) -> tuple[str, str]:
    """Return the key by which a caller's watches are counted, and its name for people."""
    grant = ADMISSION.get().grant
    if grant is None:
        address = address_of(context.peer())
        return address, address
    issuer = "" if grant.claims is None else grant.claims.issuer
    return f"{issuer} {grant.name}", f'token "{grant.name}"'


def _too_many(who: str, limit: str, value: int) -> Refusal:
    given = f"{who} has {value:,} watches of runs open"
    return limit_exceeded(limit, value, given, "End one of them, or ask with List from time to time.")

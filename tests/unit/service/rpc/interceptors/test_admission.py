"""A call knows whether its token is still valid."""

import asyncio
import hashlib
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from muster.service.core.vocabulary.refusal import Reason, Refusal
from muster.service.rpc.interceptors.guard import ADMISSION, GuardInterceptor
from muster.service.security.access import Access
from muster.service.security.config import TrafficLimits
from muster.service.security.grants import Grant, Role
from muster.service.security.tokens import Tokens
from muster.service.security.traffic import Traffic

SECRET = "s3cr3t-0123456789-abcdef"


async def test_call_knows_that_its_token_was_revoked():
    """Its process lives, and may need time to get another token."""
    grant = Grant(name="ci", role=Role.WORKER, runs=("*",), digest=hashlib.sha256(SECRET.encode()).digest())
    access = Access(lambda: Tokens((grant,)))
    interceptor = GuardInterceptor(access, Traffic(TrafficLimits(), lambda: 0.0, asyncio.sleep))
    ended: list[bool] = []

    async def connect(requests: Any, context: Any) -> None:
        ended.append(ADMISSION.get().has_ended)
        access.revoke(Tokens(()))
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(ADMISSION.get().has_ended)

    async def continuation(_: object) -> Any:
        return grpc.stream_stream_rpc_method_handler(connect)

    details: Any = SimpleNamespace(
        method="/muster.v1.SessionService/Connect",
        invocation_metadata=(("authorization", f"Bearer {SECRET}"),),
    )
    handler = await interceptor.intercept_service(continuation, details)
    with pytest.raises(Refusal) as caught:
        await handler.stream_stream(None, SimpleNamespace(peer=lambda: "ipv4:10.0.0.7:1"))
    assert caught.value.reason is Reason.TOKEN_UNKNOWN
    assert ended == [False, True]

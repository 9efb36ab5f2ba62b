"""Waiting for the first of several things."""

import asyncio
from collections.abc import Awaitable
from typing import Any


async def first(*waits: Awaitable[Any]) -> None:
    """Wait until one of the awaitables is done, and cancel the others."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()

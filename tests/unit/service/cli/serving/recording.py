"""Servers that a command would start."""

from types import ModuleType
from typing import Any

import pytest

from muster.service.telemetry import logs


def recorded(monkeypatch: pytest.MonkeyPatch, module: ModuleType, run: str) -> list[Any]:
    """The settings with which a module's function is called, which runs nothing."""
    settings: list[Any] = []

    async def record(given: object) -> None:
        settings.append(given)

    monkeypatch.setattr(module, run, record)
    monkeypatch.setattr(logs, "configure", lambda _: None)
    return settings

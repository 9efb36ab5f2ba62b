"""All that guards one coordinator, made from what it was told."""

import time
from typing import Any

from muster.service.security import tokens
from muster.service.security.access import Access
from muster.service.security.config import Security
from muster.service.security.files import Reloaded, keep_fresh
from muster.service.security.tls import Tls
from muster.service.security.traffic import Traffic


class Gate:
    """What is in force: certificates, tokens and rates.

    Args:
        security: what was asked for.

    Raises:
        FileError: a file cannot be read or used.
    """

    def __init__(self, security: Security) -> None:
        self._files: list[Reloaded[Any]] = []
        self.traffic = Traffic(security.traffic, time.monotonic)
        self.tls: Tls | None = None
        self.access: Access | None = None
        if security.tls is not None:
            self.tls = Tls(security.tls)
            self._files.append(self.tls.certificates)
        if (path := security.tokens_file) is not None:
            in_force = Reloaded("tokens", [path], lambda: tokens.load(path))
            self.access = Access(lambda: in_force.value)
            in_force.changed = self.access.revoke
            self._files.append(in_force)

    async def keep_fresh(self) -> None:
        """Follow the files, for ever."""
        await keep_fresh(self._files)

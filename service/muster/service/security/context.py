"""The current certificates, tokens and rates of one coordinator."""

import asyncio
import time
from pathlib import Path
from typing import Any

import structlog

from muster.service.security import audit, tokens
from muster.service.security.access import Access
from muster.service.security.config import Security
from muster.service.security.files import INTERVAL, Reloaded, keep_fresh
from muster.service.security.identity.verifier import Verifier
from muster.service.security.tls import Tls
from muster.service.security.tokens import Tokens
from muster.service.security.traffic import Traffic


class SecurityContext:
    """Certificates, tokens, rates and the audit log, as the settings say.

    Args:
        security: the settings.

    Raises:
        FileError: a file cannot be used.
    """

    def __init__(self, security: Security) -> None:
        self.files: list[Reloaded[Any]] = []
        """The values of files that are loaded again when the files change."""
        self._verifier = Verifier(time.time, time.monotonic)
        self.traffic = Traffic(security.traffic, time.monotonic)
        self.tls: Tls | None = None
        self.access: Access | None = None
        self.audit = audit.writer(security.audit_log) if security.audit_log else None
        """Takes the entries of the audit log; None: no audit log."""
        if security.tls is not None:
            self.tls = Tls(security.tls)
            self.files.append(self.tls.certificates)
        if (path := security.tokens_file) is not None:
            in_force = Reloaded("tokens", [path], lambda: self._tokens(path))
            self.access = Access(lambda: in_force.value, self._verifier)
            in_force.changed = self.access.revoke
            self.files.append(in_force)

    def _tokens(self, path: Path) -> Tokens:
        """Load a tokens file, and let the verifier know its issuers."""
        found = tokens.load(path)
        self._verifier.set_issuers(found.issuers)
        if overlaps := found.overlaps():
            log = structlog.get_logger()
            log.warning("tokens.overlap", file=str(path), reason=overlaps[0], others=len(overlaps) - 1)
        return found

    async def keep_fresh(self) -> None:
        """Follow the files and the issuers' keys, for ever."""
        try:
            await asyncio.gather(keep_fresh(self.files), self._refresh_keys())
        finally:
            self._verifier.close()

    async def _refresh_keys(self) -> None:
        while True:
            self._verifier.refresh()
            await asyncio.sleep(INTERVAL)

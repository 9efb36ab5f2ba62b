"""A real headless Chromium, from the Debian package that dev/fetch-debian.sh unpacks, or from the machine."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

UNPACKED = Path(__file__).parents[2] / ".tools" / "chromium"
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start the browser, with an empty profile."""
    program, environment = _program()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, env=environment, args=ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()


def _program() -> tuple[str, dict[str, str | float | bool]]:
    """The program, and the environment in which it finds its libraries and fonts."""
    unpacked = UNPACKED / "usr" / "lib" / "chromium" / "chromium"
    if not unpacked.exists():
        program = shutil.which("chromium")
        assert program, (
            "there is no Chromium to look at the status page with: run dev/fetch-debian.sh chromium, or "
            "install it with: apt-get install chromium"
        )
        return program, dict(os.environ)
    libraries = ("usr/lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu/pulseaudio", "lib/x86_64-linux-gnu")
    environment = os.environ | {
        "LD_LIBRARY_PATH": ":".join(str(UNPACKED / folder) for folder in libraries),
        "XDG_DATA_HOME": str(UNPACKED / "usr" / "share"),
    }
    if (fonts := UNPACKED / "etc" / "fonts").exists():
        environment["FONTCONFIG_PATH"] = str(fonts)
    return str(unpacked), dict(environment)

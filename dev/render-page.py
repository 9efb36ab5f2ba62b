#!/usr/bin/env python3
"""Draws docs/images/status*.png: the status page in a real browser, before made-up coordinators."""

import asyncio
import sys
from pathlib import Path

from aiohttp import web
from prometheus_client import CollectorRegistry

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from lab import scenes  # noqa: E402
from lab.processes.browser import chromium  # noqa: E402
from muster.service.web.site import build_site  # noqa: E402

IMAGES = ROOT / "docs" / "images"
WIDTH = 1000
"""Pixels of the page."""


def take(url: str, image: Path, height: int, scale: float) -> None:
    """Take a picture of the upper part of a page, with so many pixels for each of the page's."""
    with chromium() as browser:
        context = browser.new_context(
            viewport={"width": WIDTH, "height": height}, device_scale_factor=scale, color_scheme="light"
        )
        page = context.new_page()
        page.goto(url)
        page.get_by_role("status").get_by_text("Live").wait_for()
        page.screenshot(path=image)
        context.close()
    print(f"{image.relative_to(ROOT)}: {image.stat().st_size // 1024} KiB")


async def draw(scene: scenes.Scene, path: str, name: str, *, height: int, scale: float) -> None:
    """Serve a scene, and draw one of its pages."""
    runner = web.AppRunner(build_site(CollectorRegistry, lambda: None, scene, scene.ask))
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}{path}"
        await asyncio.to_thread(take, url, IMAGES / name, height, scale)
    finally:
        await runner.cleanup()


async def main() -> None:
    """Draw all pictures."""
    await draw(scenes.sixteen(), "/", "status.png", height=800, scale=1.5)
    await draw(scenes.many(4_096), "/runs/moe-400b", "status-4096.png", height=1200, scale=1)


if __name__ == "__main__":
    asyncio.run(main())

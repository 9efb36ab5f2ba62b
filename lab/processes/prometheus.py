"""A real Prometheus for tests, and its ``promtool``."""

import json
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.patience import PATIENCE, until
from lab.processes.coordinator import free_port
from lab.processes.tools import tool

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "helm" / "muster" / "rules" / "muster.rules.yaml"


def promtool(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run promtool."""
    return subprocess.run(
        [tool("promtool", "prometheus"), *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


@dataclass(frozen=True, slots=True)
class Series:
    """One series of an answer."""

    labels: dict[str, str]
    samples: tuple[tuple[float, float], ...]
    """(seconds since 1970, value); an instant query has one."""


class Prometheus:
    """A Prometheus that scrapes one coordinator, a relay and a watcher, with Muster's rules.

    Args:
        folder: for its data and its log.
        target: the coordinator's HTTP address.
        relay: the relay's, if there is one.
        watcher: the watcher's, if there is one.
        interval: seconds between two scrapes.
    """

    def __init__(
        self,
        folder: Path,
        target: str,
        relay: str = "",
        watcher: str = "",
        *,
        interval: float = 0.5,
    ) -> None:
        self._folder = folder
        self._address = f"127.0.0.1:{free_port()}"
        self._process: subprocess.Popen[bytes] | None = None
        every = f"{round(interval * 1000)}ms"
        others = {"muster-relay": relay, "muster-watcher": watcher}
        targets = {"muster": target} | {name: address for name, address in others.items() if address}
        self._config = {
            "global": {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every},
            "rule_files": [str(RULES)],
            "scrape_configs": [
                {"job_name": name, "static_configs": [{"targets": [address]}]}
                for name, address in targets.items()
            ],
        }

    def __enter__(self) -> "Prometheus":
        config = self._folder / "prometheus.yml"
        config.write_text(json.dumps(self._config))  # JSON is YAML.
        log = self._folder / "prometheus.log"
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                [
                    tool("prometheus", "prometheus"),
                    f"--config.file={config}",
                    f"--storage.tsdb.path={self._folder / 'tsdb'}",
                    f"--web.listen-address={self._address}",
                    "--log.level=warn",
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
            )
        until(self._ready, lambda: f"Prometheus does not become ready:\n{log.read_text()}")
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self._address}/-/ready", timeout=PATIENCE):
                return True
        except OSError:
            return False

    def query(self, expr: str) -> list[Series]:
        """What an expression is now."""
        found = self._get("query", query=expr)["result"]
        return [Series(one["metric"], _samples([one["value"]])) for one in found]

    def query_range(self, expr: str, start: float, end: float, step: float) -> list[Series]:
        """What an expression was at each step of a time."""
        found = self._get("query_range", query=expr, start=start, end=end, step=step)["result"]
        return [Series(one["metric"], _samples(one["values"])) for one in found]

    def rules(self) -> list[dict[str, Any]]:
        """The alerting rules, with their health and state."""
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]

    def _get(self, path: str, **parameters: object) -> Any:
        url = f"http://{self._address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=PATIENCE) as response:
                return json.load(response)["data"]
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(f"{parameters}: {error.read().decode()}") from None


def _samples(pairs: Sequence[tuple[float, str]]) -> tuple[tuple[float, float], ...]:
    return tuple((float(at), float(value)) for at, value in pairs)

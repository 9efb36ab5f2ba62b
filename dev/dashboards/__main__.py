"""Writes the dashboards' files, or, with ``--check``, tells whether they are those of this program."""

import argparse
import sys
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from dev.dashboards import overview, run

FOLDER = Path(__file__).parents[2] / "deploy" / "helm" / "muster" / "dashboards"
BUILDERS = {"overview.json": overview.build, "run.json": run.build}


def generate() -> dict[Path, str]:
    """The text of each file."""
    return {FOLDER / name: _text(build().build()) for name, build in BUILDERS.items()}


def _text(board: Dashboard) -> str:
    for number, panel in enumerate(board.panels or (), start=1):
        panel.id_val = number
    return JSONEncoder(sort_keys=True, indent=2, ensure_ascii=False).encode(board) + "\n"


def differing() -> list[Path]:
    """The files that are not what this program would write."""
    return [path for path, text in generate().items() if not path.exists() or path.read_text() != text]


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m dev.dashboards", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; end with 1 if a file differs")
    if parser.parse_args().check:
        stale = ", ".join(path.name for path in differing())
        sys.exit(f"{stale}: not what dev/dashboards makes. Run: python -m dev.dashboards" if stale else 0)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path, text in generate().items():
        path.write_text(text)
        print(path)


if __name__ == "__main__":
    main()

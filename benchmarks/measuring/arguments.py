"""Command-line arguments that several benchmarks have."""

import argparse
from pathlib import Path


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help shows the defaults."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )


def add_report_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    """Add ``--output``, ``--docs`` and ``--render-only``.

    Args:
        parser: gets them.
        name: of the benchmark, and so of its results.
    """
    parser.add_argument("--output", type=Path, default=Path(f"benchmarks/results/{name}.json"))
    parser.add_argument("--docs", type=Path, default=Path("docs/benchmarks"), help="where the page goes")
    parser.add_argument(
        "--render-only", action="store_true", help="measure nothing; report on --output again"
    )

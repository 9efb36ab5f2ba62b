#!/usr/bin/env python3
"""Write the table of values in the chart's README.md, from the comments in its values.yaml.

``--check`` writes nothing, and fails if the table is not that of values.yaml. A key's comment is the
lines right above it. A map whose keys have comments is a section; any other value is a row with its default.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

CHART = Path(__file__).resolve().parent.parent / "deploy/helm/muster"
BEGIN, END = "<!-- values: made by dev/chart-readme.py -->", "<!-- end of values -->"


def main() -> None:
    """Write the table, or compare it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 if the table is out of date"
    )
    check = parser.parse_args().check
    readme = CHART / "README.md"
    before, _, rest = readme.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    text = f"{before}{BEGIN}\n{table((CHART / 'values.yaml').read_text())}{END}{after}"
    if check and text != readme.read_text():
        sys.exit(f"the table in {readme} is not that of values.yaml. Run: dev/chart-readme.py")
    if not check:
        readme.write_text(text)


def table(values: str) -> str:
    """The rows of a values file, in Markdown.

    Raises:
        ValueError: a key has no comment.
    """
    lines = values.splitlines()
    root = yaml.compose(values, yaml.SafeLoader)
    assert isinstance(root, yaml.MappingNode)
    rows = "".join(f"| {key} | {default} | {comment} |\n" for key, default, comment in _rows(root, "", lines))
    return f"| Value | Default | Meaning |\n|-|-|-|\n{rows}"


def _rows(node: yaml.MappingNode, prefix: str, lines: list[str]) -> Iterator[tuple[str, str, str]]:
    for key, value in node.value:
        path, comment = prefix + key.value, _comment(lines, key.start_mark.line)
        if isinstance(value, yaml.MappingNode) and _is_section(value, lines):
            if comment:
                yield f"**`{path}`**", "", comment
            yield from _rows(value, f"{path}.", lines)
        elif comment:
            default = json.dumps(yaml.SafeLoader("").construct_document(value), ensure_ascii=False)
            yield f"`{path}`", f"`{default}`", comment
        else:
            raise ValueError(f"{path} in values.yaml has no comment above it")


def _is_section(node: yaml.MappingNode, lines: list[str]) -> bool:
    return not node.flow_style and any(_comment(lines, key.start_mark.line) for key, _ in node.value)


def _comment(lines: list[str], line: int) -> str:
    """The comment right above a line; none for what stands in the line of its parent."""
    found: list[str] = []
    while line > 0 and lines[line - 1].lstrip().startswith("#"):
        line -= 1
        found.insert(0, lines[line].lstrip().removeprefix("#").strip())
    return " ".join(found).replace("|", "\\|")


if __name__ == "__main__":
    main()

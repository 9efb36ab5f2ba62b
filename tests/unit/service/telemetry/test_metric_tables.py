"""The tables of metrics in docs have each metric of the code, and no others."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[4]
TELEMETRY = ROOT / "service/muster/service/telemetry"
PAGES = ("docs/operations.md", "docs/notices.md")
NAME = re.compile(r"(?:muster|grpc_server)_[a-z_]+")
ROW = re.compile(rf"^\| `({NAME.pattern})` \| (?:gauge|counter|histogram) \|", re.MULTILINE)
SUFFIX = re.compile(r"_(?:total|info)$")
"""What Prometheus' library adds to the name of a counter or an info."""


def named_in_code() -> set[str]:
    """Return each string of the telemetry modules that is the name of a metric."""
    return {
        SUFFIX.sub("", node.value)
        for path in TELEMETRY.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and NAME.fullmatch(node.value)
    }


def test_tables_have_each_metric_once():
    rows = [name for page in PAGES for name in ROW.findall((ROOT / page).read_text())]
    assert len(rows) == len(set(rows)) > 60
    assert {SUFFIX.sub("", name) for name in rows} == named_in_code()

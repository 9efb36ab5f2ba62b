"""Why a rank has failed, in words that all ranks get."""

import traceback

MAX_TEXT = 12_000
"""Limit in bytes for a failure's text; the coordinator keeps 16 KiB of a vote's reason."""


def failure_text(error: BaseException) -> str:
    """Return an exception's text for a vote: the exception, then its traceback."""
    lines = traceback.format_exception(error)
    headline = "".join(traceback.format_exception_only(error)).strip()
    return cut(f"{headline}\n{''.join(lines)}")


def cut(text: str) -> str:
    """Cut a text that is too long for a vote to its end: a traceback's end says most."""
    data = text.encode("utf-8", "backslashreplace")
    if len(data) <= MAX_TEXT:
        return text
    return f"… {data[-MAX_TEXT:].decode('utf-8', 'ignore')}"

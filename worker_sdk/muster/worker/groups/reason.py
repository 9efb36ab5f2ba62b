"""Why a rank has failed, in words that every rank gets."""

import traceback

MAX_TEXT = 12_000
"""Bytes of a child's report; the coordinator keeps 16 KiB of a vote's reason."""


def failure_text(error: BaseException) -> str:
    """An exception for the vote: what it is, then where it was raised."""
    lines = traceback.format_exception(error)
    headline = "".join(traceback.format_exception_only(error)).strip()
    return cut(f"{headline}\n{''.join(lines)}")


def cut(text: str) -> str:
    """The end of a text that is too long for a vote: a traceback's end says most."""
    data = text.encode("utf-8", "backslashreplace")
    if len(data) <= MAX_TEXT:
        return text
    return f"… {data[-MAX_TEXT:].decode('utf-8', 'ignore')}"

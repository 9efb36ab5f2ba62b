"""Why a rank has failed, in words that all ranks get."""

import errno
import traceback
from collections.abc import Iterator

MAX_TEXT = 12_000
"""Limit in bytes for a failure's text; the coordinator keeps 16 KiB of a vote's reason."""
MAX_HEADLINE = 2_000
"""Bytes of these for the exception itself. Its beginning stays, however long its traceback is."""
OF_STORAGE = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE, errno.EFBIG}
"""Errors of storage. Torch raises another error on top of them, which says nothing of a full disk."""


def failure_text(error: BaseException) -> str:
    """Return an exception's text for a vote: the exception, then its traceback.

    If an error of the storage led to it, that one comes first.
    """
    lines = traceback.format_exception(error)
    headline = _line(error)
    for cause in causes(error):
        if cause is not error and isinstance(cause, OSError) and cause.errno in OF_STORAGE:
            headline = f"{_line(cause)}; then {headline}"
            break
    headline = headline.encode("utf-8", "backslashreplace")[:MAX_HEADLINE].decode("utf-8", "ignore")
    return f"{headline}\n{cut(''.join(lines), MAX_TEXT - MAX_HEADLINE)}"


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, and then those that led to it, the newest first."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        yield one
        seen.add(id(one))
        one = one.__cause__ or one.__context__


def _line(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip()


def cut(text: str, limit: int = MAX_TEXT) -> str:
    """Cut a text of more bytes to its end: a traceback's end says most."""
    data = text.encode("utf-8", "backslashreplace")
    if len(data) <= limit:
        return text
    return f"… {data[-limit:].decode('utf-8', 'ignore')}"

"""Ids of traces and spans, derived from the names of what they describe.

The coordinator and every rank derive the same ids, so a save needs no propagated context. All are
pure functions of their arguments. W3C trace contexts have 16 bytes for a trace and 8 for a span, and none of
them may be zero.
"""

from hashlib import blake2b

TRACE_BYTES = 16
SPAN_BYTES = 8


def barrier_trace(run_id: str, prefix: str, sequence: int) -> int:
    """Return the trace id of a barrier, and of the save that it commits."""
    return _derived(TRACE_BYTES, "barrier", run_id, prefix, str(sequence))


def round_trace(run_id: str, number: int) -> int:
    """Return the trace id of a rendezvous round."""
    return _derived(TRACE_BYTES, "round", run_id, str(number))


def span_id(trace: int, *names: str | int) -> int:
    """Return the id of a span.

    Args:
        trace: the id of its trace.
        *names: what distinguishes the span within the trace, such as its name and the rank.
    """
    return _derived(SPAN_BYTES, str(trace), *map(str, names))


def trace_text(trace: int) -> str:
    """Return a trace id as people and exemplars write it: 32 hexadecimal digits."""
    return f"{trace:032x}"


def _derived(size: int, *parts: str) -> int:
    """Return a hash of the parts that is not zero.

    The length before each part keeps ``a, bc`` apart from ``ab, c``.
    """
    digest = blake2b(digest_size=size)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "big"))
        digest.update(data)
    return int.from_bytes(digest.digest(), "big") or 1

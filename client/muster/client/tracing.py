"""Turns tracing on if the environment asks for it."""

import os
from collections.abc import Callable

from muster.client.span_export import SpanExport

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
"""The variable that turns tracing on."""


def is_wanted() -> bool:
    """Return whether the environment turns tracing on."""
    return bool(os.environ.get(ENDPOINT))


def open_export(service: str, version: str, warn: Callable[[str], None]) -> SpanExport | None:
    """Open the export that the environment asks for.

    Args:
        service: the name of this service in the traces.
        version: its version.
        warn: called with a sentence if tracing is wanted and not possible.

    Returns:
        The export; None if tracing is off or not possible. Then nothing of OpenTelemetry is imported.
    """
    if not is_wanted():
        return None
    try:
        from muster.client.otlp import OtlpExporter

        return SpanExport(OtlpExporter(service, version))
    except ImportError as error:
        warn(
            f"{ENDPOINT} is set, but OpenTelemetry is not installed ({error}): there will be no traces. "
            'Install it by pip install "muster-coordinator[otel]".'
        )
    except Exception as error:  # Whatever a library says of its settings must not stop a job.
        warn(f"{ENDPOINT} is set, but its exporter cannot be used ({error}): there will be no traces.")
    return None

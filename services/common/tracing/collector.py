"""Where traces are sent: the collector's address, and tracing for it."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from services.common.errors import InvalidConfiguration
from services.common.values import Kind

if TYPE_CHECKING:
    from services.common.tracing.otlp import OtlpTracing


def _endpoint(text: str) -> str:
    try:
        parts = urlsplit(text)
        whole = parts.scheme in ("http", "https") and parts.hostname and parts.port
    except ValueError:
        whole = False
    if not whole or text != f"{parts.scheme}://{parts.netloc}" or "@" in text:
        raise ValueError("expected http://host:port, or https://host:port for TLS, of an OTLP/gRPC collector")
    return text


#: A collector's address.
endpoint = Kind(_endpoint, "http://host:port or https://host:port")


def in_clear(address: str) -> str:
    """The host that an endpoint sends to without TLS; empty for one with TLS."""
    parts = urlsplit(address)
    return parts.hostname or "" if parts.scheme == "http" else ""


def tracing_to(address: str | None, ratio: float, **resource: str) -> OtlpTracing | None:
    """Traces to a collector, None without one; ``resource`` has OpenTelemetry's names with _ for each dot.

    OpenTelemetry is imported here and nowhere else. Raises InvalidConfiguration if it is not installed or refuses its
    variables.
    """
    if address is None:
        return None
    try:
        from services.common.tracing.otlp import OtlpTracing
    except ImportError as error:
        raise InvalidConfiguration(
            f"--otlp-endpoint: {error.name} is missing; `pip install 'rocmforge[otel]'`", field="--otlp-endpoint"
        ) from error
    try:
        return OtlpTracing(address, ratio, {name.replace("_", "."): text for name, text in resource.items()})
    except Exception as error:  # whatever the SDK makes of OTEL_* variables
        raise InvalidConfiguration(f"--otlp-endpoint {address}: {error}", field="--otlp-endpoint") from error

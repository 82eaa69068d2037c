"""An address of this host for a port that is given back and taken again.

On 127.0.0.1 somebody else may have it meanwhile: a listener that takes any port, or a connection, even one that is
tried to that very port.
"""

from __future__ import annotations

import secrets


def own_host() -> str:
    """One of the sixteen million addresses of the loopback device, which nobody else uses."""
    return f"127.{secrets.randbelow(254) + 1}.{secrets.randbelow(256)}.{secrets.randbelow(254) + 1}"

"""How the outer tier is reached."""

from __future__ import annotations

import importlib.util
from typing import Annotated

import msgspec
from msgspec import Meta

#: What the extra `tiers` installs, as it is imported.
LIBRARIES = ("crc32c", "cryptography", "glide_sync")

Port = Annotated[int, Meta(ge=1, le=65535)]


class OuterTier(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One server, or with ``cluster`` any nodes of a cluster. Secrets stay in their files, which the mover reads.

    Without ``key_file``, values are stored in plaintext. ``operation_seconds`` limits each operation, connecting
    included; ``connections`` carry one operation each.
    """

    addresses: Annotated[
        tuple[tuple[str, Annotated[int, Meta(ge=1, le=65535)]], ...], Meta(min_length=1, max_length=64)
    ]
    ttl_seconds: Annotated[int, Meta(ge=1, le=1 << 31)]
    cluster: bool = False
    tls: bool = False
    ca_file: str = ""
    username: str = ""
    password_file: str = ""
    key_file: str = ""
    operation_seconds: Annotated[float, Meta(gt=0)] = 1.0
    connections: Annotated[int, Meta(ge=1, le=64)] = 4


def missing_libraries() -> list[str]:
    """Those of `LIBRARIES` that are not installed. Imports none of them."""
    return [name for name in LIBRARIES if importlib.util.find_spec(name) is None]

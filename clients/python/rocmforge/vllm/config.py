"""The connector's settings: ``kv_connector_extra_config`` of vLLM's ``--kv-transfer-config``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Settings:
    """What may be set. Only ``daemon`` must be.

    - ``daemon``: its address, ``unix:PATH`` or ``HOST:PORT`` on this machine.
    - ``pool_id``: instead of one made of vLLM's version, its numerics and the model: engines with the same one share
      K and V, so only name one where they compute the same.
    - ``page_size``: tokens in a page; vLLM's block size if unset. One must be a multiple of the other.
    - ``pool_pages``: pages of the pool if this engine creates it; the daemon's default if unset.
    - ``ttl_s``: seconds of the lease; the daemon's default if unset.
    - ``owner``: the uid that the daemon runs as; this user's or root if unset.
    - ``lookup_timeout_s``: a lookup that is not answered by then is a miss.
    - ``direct``: vLLM's blocks are the daemon's pages, and nothing is copied.
    """

    daemon: str
    pool_id: str = ""
    page_size: int | None = None
    pool_pages: int | None = None
    ttl_s: float | None = None
    owner: int | None = None
    lookup_timeout_s: float = 0.5
    direct: bool = False

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Settings:
        """Read them. Raises ValueError, naming the setting and its limit."""
        if unknown := sorted(set(values) - set(cls.__slots__)):
            raise ValueError(
                f"kv_connector_extra_config.{unknown[0]}: no such setting; there are {', '.join(cls.__slots__)}"
            )
        daemon = values.get("daemon")
        if not isinstance(daemon, str) or not daemon:
            raise ValueError(
                "kv_connector_extra_config.daemon: expected the daemon's address, such as unix:/run/kvcache.sock"
            )
        pool_id = values.get("pool_id", "")
        if not isinstance(pool_id, str) or len(pool_id) > 80:
            raise ValueError("kv_connector_extra_config.pool_id: expected at most 80 characters")
        direct = values.get("direct", False)
        if not isinstance(direct, bool):
            raise ValueError(f"kv_connector_extra_config.direct is {direct!r}: expected true or false")
        return cls(
            daemon,
            pool_id,
            _number(values, "page_size", 1, 1024, int),
            _number(values, "pool_pages", 1, 2**31 - 1, int),
            _number(values, "ttl_s", 1, 600, (int, float)),
            _number(values, "owner", 0, 2**32 - 2, int),
            _number(values, "lookup_timeout_s", 0, 60, (int, float), 0.5),
            direct,
        )


def _number(values: Mapping[str, Any], name: str, least: float, most: float, kinds: Any, default: Any = None) -> Any:
    value = values.get(name, default)
    if value is default:
        return default
    if not isinstance(value, kinds) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"kv_connector_extra_config.{name} is {value!r}: expected {least} to {most}")
    return value

"""One connection to the outer tier, through GLIDE's synchronous client.

Every call ends within the operation's limit, whatever the server does. The library copies what it sends and receives
inside the call, so the caller's memory is its own again when the call returns, also after a time-out.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from services.common.errors import InvalidConfiguration
from services.kvcache.outer.secret import read_password
from services.kvcache.outer.settings import OuterTier


class OuterError(Exception):
    """The outer tier did not do what it was asked for. The message is one line for logs and statistics.

    ``lost`` says that the connection is not to be used again.
    """

    def __init__(self, message: str, *, lost: bool = False) -> None:
        super().__init__(message[:500])
        self.lost = lost


class WrongValue(OuterError):
    """What is under the key is no value of this size at most."""


class Connection:
    """For one thread at a time. Every call raises OuterError if it could not be done."""

    def __init__(self, settings: OuterTier) -> None:
        import glide_sync as glide

        glide.Logger.set_logger_config(glide.LogLevel.OFF)
        self._glide: Any = glide
        self._cluster = settings.cluster
        limit_ms = max(1, round(settings.operation_seconds * 1000))
        password, tls = "", None
        try:
            # Read anew by each connection: they may have been replaced.
            if settings.password_file:
                password = read_password(Path(settings.password_file), "--outer-password-file")
            if settings.ca_file:
                tls = glide.TlsAdvancedConfiguration(root_pem_cacerts=Path(settings.ca_file).read_bytes())
        except OSError as error:
            raise OuterError(f"{settings.ca_file}: {error.strerror or error}", lost=True) from error
        except InvalidConfiguration as error:
            raise OuterError(error.message, lost=True) from error
        kind = "GlideCluster" if settings.cluster else "Glide"
        advanced, configuration, client = (
            getattr(glide, name)
            for name in (f"Advanced{kind}ClientConfiguration", f"{kind}ClientConfiguration", f"{kind}Client")
        )
        common: dict[str, Any] = {
            "use_tls": settings.tls,
            "credentials": glide.ServerCredentials(password, settings.username or None) if password else None,
            "request_timeout": limit_ms,
            # A connection that fails is replaced by the store, which knows how long to leave the servers alone.
            "reconnect_strategy": glide.BackoffStrategy(num_of_retries=1, factor=50, exponent_base=2),
            "client_name": "rocmforge",
            "advanced_config": advanced(connection_timeout=limit_ms, tls_config=tls),
        }
        addresses = [glide.NodeAddress(host, port) for host, port in settings.addresses]
        try:
            self._client: Any = client.create(configuration(addresses, **common))
        except (glide.GlideError, ValueError, TypeError) as error:
            raise _failed(error, lost=True) from error

    def set(self, key: bytes, value: memoryview, ttl_seconds: int) -> None:
        """Write a value that expires."""
        expiry = self._glide.ExpirySet(self._glide.ExpiryType.SEC, ttl_seconds)
        self._call(self._client.set, key, value, expiry=expiry)

    def get(self, key: bytes, into: memoryview) -> int | None:
        """Read a value into ``into``; its length, None if there is none. Raises WrongValue."""
        size = self._call(self._client.get, key, buffer=into)
        return None if size is None else int(size)

    def exist(self, keys: Sequence[bytes]) -> list[bool]:
        """Which keys there are, in one round trip (to each node that has some of them)."""
        batch = self._glide.ClusterBatch(is_atomic=False) if self._cluster else self._glide.Batch(is_atomic=False)
        for key in keys:
            batch.exists([key])
        return [bool(count) for count in self._call(self._client.exec, batch, raise_on_error=True)]

    def delete(self, keys: Sequence[bytes]) -> None:
        """Delete keys, in the background of the server."""
        self._call(self._client.unlink, list(keys))

    def close(self) -> None:
        """Idempotent."""
        self._client.close()

    def _call(self, function: Any, *arguments: Any, **named: Any) -> Any:
        try:
            return function(*arguments, **named)
        except self._glide.RequestError as error:
            if "exceeds buffer" in str(error):
                raise WrongValue("the value is larger than a page's of this layout") from error
            if "WRONGTYPE" in str(error):
                raise WrongValue("under the key is something else than a value") from error
            broken = isinstance(error, (self._glide.TimeoutError, self._glide.ConnectionError))
            raise _failed(error, lost=broken or _moved(error)) from error
        except self._glide.GlideError as error:
            raise _failed(error, lost=True) from error


def _moved(error: Exception) -> bool:
    """Whether the server at this address has another role now, so that the address is to be looked up again."""
    return any(word in str(error) for word in ("READONLY", "MOVED", "CLUSTERDOWN", "LOADING", "MASTERDOWN"))


def _failed(error: Exception, *, lost: bool) -> OuterError:
    return OuterError(" ".join(str(error).split()) or type(error).__name__, lost=lost)

"""The settings of the tiers below the pools."""

from __future__ import annotations

import hmac
import urllib.parse
from dataclasses import dataclass
from pathlib import Path

from services.common.errors import InvalidConfiguration
from services.common.listening import Listening, file_path
from services.common.settings import setting
from services.common.values import Kind, byte_size, one_of, seconds, switch, whole
from services.kvcache.outer.secret import read_key, read_password
from services.kvcache.outer.settings import OuterTier, missing_libraries
from services.kvcache.tiers.tiers import TierSettings

RETURNED, ALL = "returned", "all"

#: Schemes of --outer, and whether they are TLS.
SCHEMES = {"valkey": False, "redis": False, "valkeys": True, "rediss": True}

_PORT = 6379
_MOST_ADDRESSES = 64


@dataclass(frozen=True, slots=True)
class OuterAddress:
    """What --outer says: one server, or nodes of a cluster."""

    text: str
    addresses: tuple[tuple[str, int], ...]
    tls: bool
    username: str = ""

    def __str__(self) -> str:
        return self.text

    @classmethod
    def parse(cls, text: str) -> OuterAddress:
        """Raises ValueError."""
        scheme, separator, rest = text.partition("://")
        if not separator or scheme not in SCHEMES:
            raise ValueError(f"expected {', '.join(f'{one}://' for one in SCHEMES)} and host:port[,host:port]")
        user, at, hosts = rest.rpartition("@")
        if ":" in user or (at and not user):
            raise ValueError("expected user@ at most before the host: the password goes into --outer-password-file")
        found = tuple(_address(one) for one in hosts.split(","))
        if len(found) > _MOST_ADDRESSES:
            raise ValueError(f"expected at most {_MOST_ADDRESSES} addresses")
        return cls(text, found, SCHEMES[scheme], urllib.parse.unquote(user))


def _address(text: str) -> tuple[str, int]:
    """Raises ValueError."""
    parts = urllib.parse.urlsplit(f"//{text}")
    if not parts.hostname or parts.path or parts.query or parts.fragment:
        raise ValueError(f"expected host:port, got {text!r}")
    return parts.hostname, parts.port or _PORT


@dataclass(frozen=True, slots=True, kw_only=True)
class TierConfig(Listening):
    """The settings of the host tier and of the outer tier."""

    host_cache: int | None = setting(
        byte_size,
        None,
        "memory of this machine for pages that pools give up, in files of --arena-dir, beside --memory; default: none",
        metavar="SIZE",
    )
    outer: OuterAddress | None = setting(
        Kind(OuterAddress.parse, "valkey://host:port"),
        None,
        "Valkey or Redis for pages that pools give up, shared by many daemons: valkey://[user@]host:port, with TLS "
        "valkeys://; several addresses, with commas, are nodes of a cluster; default: none",
        metavar="URL",
    )
    outer_key: Path | None = setting(
        file_path,
        None,
        "key that pages in --outer are encrypted with: a file of 32 bytes, or of 64 hexadecimal digits; daemons that "
        "share pages have the same",
        metavar="FILE",
    )
    outer_plaintext: bool = setting(switch, False, "store pages in --outer unencrypted, with the tokens of prompts")
    outer_ttl_s: float = setting(
        seconds(1, 10**9), 86400.0, "seconds after which a page in --outer expires", name="outer-ttl", metavar="S"
    )
    outer_password_file: Path | None = setting(file_path, None, "file with the password for --outer", metavar="FILE")
    outer_ca: Path | None = setting(
        file_path, None, "PEM CA certificate for --outer with TLS; default: the system's", metavar="FILE"
    )
    tier_admission: str = setting(
        one_of(RETURNED, ALL),
        RETURNED,
        "which cached pages are stored below the pools: those that have `returned`, having been matched by a prompt "
        "since they were computed, and retained ones; or `all`",
        metavar="X",
    )
    tier_queue: int = setting(
        whole(1, 1 << 20),
        4096,
        "pages that wait to be stored below the pools; more are dropped",
        metavar="N",
    )
    tier_prefill_speed: int = setting(
        whole(1, 10**9),
        5000,
        "tokens a second that an engine is taken to prefill which does not report it",
        metavar="N",
    )

    @property
    def has_tiers(self) -> bool:
        """Whether there is anything below the pools."""
        return self.host_cache is not None or self.outer is not None

    def check_tiers(self) -> None:
        """Whether the settings of the tiers fit together, and their files can be read. Raises InvalidConfiguration."""
        if self.outer is None:
            for flag, value in (
                ("--outer-key", self.outer_key),
                ("--outer-plaintext", self.outer_plaintext),
                ("--outer-password-file", self.outer_password_file),
                ("--outer-ca", self.outer_ca),
            ):
                if value:
                    raise InvalidConfiguration(f"{flag} needs --outer", field=flag)
            return
        if (self.outer_key is None) == (not self.outer_plaintext):
            raise InvalidConfiguration(
                f"--outer {self.outer}: give either --outer-key FILE, to encrypt what is stored there, or "
                "--outer-plaintext: pages contain prompts",
                field="--outer-key",
            )
        if self.outer_ca is not None and not self.outer.tls:
            raise InvalidConfiguration("--outer-ca needs --outer with valkeys:// or rediss://", field="--outer-ca")
        if missing := missing_libraries():
            raise InvalidConfiguration(
                f"--outer needs {', '.join(missing)}: pip install 'rocmforge[tiers]'", field="--outer"
            )
        if self.outer_key is not None:
            read_key(self.outer_key, "--outer-key")
        if self.outer_password_file is not None:
            read_password(self.outer_password_file, "--outer-password-file")

    @property
    def outer_tier(self) -> OuterTier | None:
        """How the mover reaches the outer tier."""
        if self.outer is None:
            return None
        return OuterTier(
            addresses=self.outer.addresses,
            ttl_seconds=int(self.outer_ttl_s),
            cluster=len(self.outer.addresses) > 1,
            tls=self.outer.tls,
            ca_file=_absolute(self.outer_ca),
            username=self.outer.username,
            password_file=_absolute(self.outer_password_file),
            key_file=_absolute(self.outer_key),
        )

    def read_tier_settings(self) -> TierSettings:
        """What the tiers are made with. Raises InvalidConfiguration if the key cannot be read."""
        key = b""
        if self.outer_key is not None:
            key = hmac.digest(read_key(self.outer_key, "--outer-key"), b"rocmforge page digests", "sha256")
        return TierSettings(
            host_bytes=self.host_cache or 0,
            outer=self.outer is not None,
            admits_all=self.tier_admission == ALL,
            queue=self.tier_queue,
            prefill_tokens_per_s=float(self.tier_prefill_speed),
            key=key,
        )


def _absolute(path: Path | None) -> str:
    return "" if path is None else str(path.absolute())

"""Authorities, and what they sign, as files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import trustme


@dataclass(frozen=True)
class Pair:
    """A certificate, its key, and the CA that signed it."""

    cert: Path
    key: Path
    ca: Path

    def serving(self, clients: Path | None = None) -> list[str]:
        """The flags of a service; ``clients`` is the CA of its clients."""
        flags = ["--tls-cert", str(self.cert), "--tls-key", str(self.key)]
        return flags if clients is None else [*flags, "--tls-client-ca", str(clients)]

    def become(self, other: Pair) -> None:
        """Take over the files of another pair, as a renewal does: each is replaced at once."""
        for own, new in ((self.cert, other.cert), (self.key, other.key), (self.ca, other.ca)):
            fresh = own.with_suffix(".new")
            fresh.write_bytes(new.read_bytes())
            fresh.replace(own)


def issued(folder: Path, name: str, *hosts: str, authority: trustme.CA | None = None, common: str = "") -> Pair:
    """A certificate for ``hosts`` with a common name, by an authority of its own unless one is given."""
    authority = authority or trustme.CA()
    made = authority.issue_cert(*(hosts or ("127.0.0.1",)), common_name=common or None)
    pair = Pair(*(folder / f"{name}.{kind}" for kind in ("crt", "key", "ca")))
    made.cert_chain_pems[0].write_to_path(pair.cert)
    made.private_key_pem.write_to_path(pair.key)
    authority.cert_pem.write_to_path(pair.ca)
    return pair

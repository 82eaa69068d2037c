"""Who calls: one identity a call, of which the transport is the only witness.

On a unix socket it is the uid that the kernel lets connect there, with mutual TLS the name in the client's certificate.
A caller that proves nothing is `ANYONE`. Nothing in a request says who sent it.
"""

from __future__ import annotations

import re
from contextvars import ContextVar
from dataclasses import dataclass

MAX_UID = 2**32 - 2  # the one above stands for no user
MAX_NAME = 256

_NAMED = re.compile(r"(cn|token):([^\x00-\x1f\x7f,]+)")


@dataclass(frozen=True, slots=True)
class Identity:
    """``text`` is ``uid:1000``, ``cn:alice``, ``token:gateway`` or ``anyone``: equal identities have equal texts."""

    text: str

    @classmethod
    def parse(cls, text: str) -> Identity:
        """An identity as people write it. Raises ValueError, saying what was expected."""
        kind, _, name = text.partition(":")
        if kind == "uid" and name.isascii() and name.isdigit() and len(name) <= 10 and int(name) <= MAX_UID:
            return cls.of_uid(int(name))
        if text == ANYONE.text or (len(name) <= MAX_NAME and _NAMED.fullmatch(text)):
            return cls(text)
        raise ValueError("expected uid:NUMBER, cn:NAME, token:NAME or anyone")

    @classmethod
    def of_uid(cls, uid: int) -> Identity:
        """A user of this machine."""
        return cls(f"uid:{uid}")

    @classmethod
    def of_certificate(cls, name: str) -> Identity:
        """The name in a client's certificate, which a CA that the service trusts has signed; `ANYONE` for a name that
        no policy can name.
        """
        try:
            return cls.parse(f"cn:{name}")
        except ValueError:
            return ANYONE

    @classmethod
    def of_token(cls, name: str) -> Identity:
        """The holder of the token with this name."""
        return cls(f"token:{name}")

    @property
    def uid(self) -> int | None:
        """The uid, if it is a user of this machine."""
        kind, _, name = self.text.partition(":")
        return int(name) if kind == "uid" else None

    def __str__(self) -> str:
        return self.text


#: A caller that proves nothing about itself: TCP without mutual TLS, or without a token.
ANYONE = Identity("anyone")

#: The identity of the caller being served; each call is a task with its own context.
CALLER: ContextVar[Identity] = ContextVar("caller", default=ANYONE)

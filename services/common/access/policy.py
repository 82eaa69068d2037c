"""Which roles an identity has: what `--allow role=identity` grants, and all of them for the service's own user."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from services.common.access.identity import CALLER, Identity
from services.common.errors import RoleMissing
from services.common.values import Kind


@dataclass(frozen=True, slots=True)
class Allowance:
    """One role for one identity."""

    role: str
    identity: Identity

    def __str__(self) -> str:
        return f"{self.role}={self.identity}"


def allowance(roles: Iterable[str]) -> Kind:
    """The kind of setting that is one of ``roles``, ``=`` and an identity: ``viewer=uid:1000``."""
    words = tuple(roles)

    def parse(text: str) -> Allowance:
        role, _, identity = text.partition("=")
        if role not in words:
            raise ValueError(f"expected role=identity with a role of {', '.join(words)}")
        return Allowance(role, Identity.parse(identity))

    return Kind(parse, "role=identity")


class Policy:
    """``includes`` has for each role those that come with it; its keys are all roles. ``owner`` has every role."""

    def __init__(self, owner: Identity, allowed: Iterable[Allowance], includes: Mapping[str, frozenset[str]]) -> None:
        self.owner = owner
        self._roles: dict[Identity, frozenset[str]] = {owner: frozenset(includes)}
        for one in allowed:
            has = self._roles.get(one.identity, frozenset())
            self._roles[one.identity] = has | {one.role} | includes[one.role]
        # Asked at every call: a string keeps its hash.
        self._by_text = {identity.text: roles for identity, roles in self._roles.items()}

    @property
    def guests(self) -> list[int]:
        """The uids with a role, other than the owner's, in order."""
        uids = {one.uid for one in self._roles if one != self.owner}
        return sorted(uid for uid in uids if uid is not None)

    def holders(self, role: str) -> list[Identity]:
        """Who has a role, the owner included."""
        return [identity for identity, roles in self._roles.items() if role in roles]

    def has(self, identity: Identity, role: str) -> bool:
        """Whether an identity has a role."""
        return role in self._roles.get(identity, ())

    def require(self, role: str) -> str:
        """The caller of the call being served, as text. Raises RoleMissing unless it has the role."""
        caller = CALLER.get()
        if role not in self._by_text.get(caller.text, ()):
            raise RoleMissing(
                f"this call needs the role {role}, which {caller} does not have; the service gives it with --allow "
                f"{role}={caller}",
                identity=caller,
                role=role,
            )
        return caller.text

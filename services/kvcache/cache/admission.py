"""Whether a session may be opened: how many there are, and whose turn it is to attach to GPU memory."""

from __future__ import annotations

from services.common.errors import AttachBusy, FieldInvalid, TooManySessions
from services.kvcache.cache.limits import MAX_TTL_S, MIN_TTL_S, Limits
from services.kvcache.lease.quarantine import Quarantine
from services.kvcache.lease.sessions import Sessions
from services.kvcache.lease.witness import Process

#: A session has the way to GPU memory for itself until it has attached, and for so long at most: ROCm itself gives an
#: open 10 s. Opens from several processes at a time are not to be relied on.
ATTACH_S = 10.0


class Admission:
    """What a session has to meet before anything is done for it. ``devices`` is how many GPUs there are; None: pools
    are in the host's memory. ``refusals`` counts those who had to wait for their turn.
    """

    def __init__(self, sessions: Sessions, quarantine: Quarantine, devices: int | None) -> None:
        self.refusals = 0
        self._sessions = sessions
        self._quarantine = quarantine
        self._devices = devices

    def check(
        self,
        limits: Limits,
        caller: str,
        ttl: float,
        max_pages: int | None,
        process: Process | None,
        device: int | None,
        now: float,
    ) -> None:
        """Raises FieldInvalid, TooManySessions, AttachBusy."""
        if not MIN_TTL_S <= ttl <= MAX_TTL_S:
            raise FieldInvalid(f"ttl is {ttl:g} s; it must be {MIN_TTL_S:g} to {MAX_TTL_S:g} s", field="ttl")
        opened, lost = len(self._sessions), len(self._quarantine)
        if opened + lost >= limits.max_sessions:
            raise TooManySessions(
                f"{opened} sessions are open and {lost} lost ones in quarantine, the limit",
                limit=limits.max_sessions,
            )
        self._check_sessions_of(limits, caller)
        if max_pages == 0:
            raise FieldInvalid("max_pages is 0; a session needs at least one page", field="max_pages")
        self._check_device(device)
        self._check_turn(process, now)

    def _check_sessions_of(self, limits: Limits, caller: str) -> None:
        own = self._sessions.of(caller)
        lost = self._quarantine.lost_of(caller)
        if len(own) + lost >= limits.identity_sessions:
            more = f" and {lost} lost ones in quarantine" if lost else ""
            raise TooManySessions(
                f"{caller} has {len(own)} sessions{more}, the limit of one identity",
                identity=caller,
                limit=limits.identity_sessions,
            )
        unattached = sum(not session.attached for session in own)
        if unattached >= limits.identity_unattached:
            raise TooManySessions(
                f"{caller} has {unattached} sessions that have not attached, the limit of one identity; each ends "
                f"{ATTACH_S:g} s after it was opened",
                identity=caller,
                limit=limits.identity_unattached,
            )

    def _check_device(self, device: int | None) -> None:
        count = self._devices
        if count is None and device is not None:
            raise FieldInvalid(
                f"device_ordinal is {device}; this daemon's pages are in the host's memory: leave it unset, or start "
                "the daemon with --device gpu",
                field="device_ordinal",
            )
        if count is not None and (device is None or device >= count):
            raise FieldInvalid(
                f"device_ordinal is {'unset' if device is None else device}; this daemon's pages are on GPUs, and it "
                f"has {count}: it must be 0 to {count - 1}",
                field="device_ordinal",
                limit=count - 1,
            )

    def _check_turn(self, process: Process | None, now: float) -> None:
        for other in self._sessions.all():
            # An engine that opens again has given its last attempt up: it never saw the reply.
            if other.attach_until > now and (process is None or other.process != process):
                self.refusals += 1
                raise AttachBusy("another engine is attaching to GPU memory, which only one does at a time")

"""What a KvCache needs from outside, made of plain objects: memory, a clock, a process table."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable

from services.kvcache.cache.cache import KvCache
from services.kvcache.cache.limits import Limits
from services.kvcache.cache.walk import check
from services.kvcache.lease.sessions import Session
from services.kvcache.lease.witness import Process
from services.kvcache.pool.arena import DeviceMemory
from services.kvcache.pool.budget import CANARY_BYTES, CANARY_SLOT_BYTES
from services.kvcache.pool.index.chain_hash import ChainHash, blake2b_chain
from services.kvcache.pool.layout import Layout, PageLayout
from services.kvcache.pool.pool import Pool
from services.kvcache.scrub.purge import purge

LAYOUT = PageLayout(page_size=4, layers=1, kv_heads=1, head_dim=4, dtype="f32")


class FakeArena:
    """Canaries in a dict; of pages what was done to them, which is all that their checksums are made of."""

    file_path = "/proc/none"

    def __init__(self, layout: Layout, pages: int, slots: int, device: int | None = None) -> None:
        self.device = None if device is None else DeviceMemory(device, f"0000:{device:02x}:00.0", bytes(64))
        self.size_bytes = pages * layout.page_bytes + slots * CANARY_SLOT_BYTES
        self.canaries: dict[int, bytes] = {}
        self.answers: dict[int, bytes] = {}
        self.admitted: list[str] = []
        self.closed = False
        self.damage: dict[int, int] = {}
        self.zeroed: list[int] = []

    def admit(self, owner: str) -> None:
        self.admitted.append(owner)

    def dismiss(self, owner: str) -> None:
        self.admitted = [one for one in self.admitted if one != owner]

    def canary_offset(self, slot: int) -> int:
        return slot

    def write_canary(self, slot: int, canary: bytes) -> None:
        self.canaries[slot], self.answers[slot] = canary, bytes(CANARY_BYTES)

    def read_answer(self, slot: int) -> bytes:
        return self.answers[slot]

    def checksums(self, pages: list[int]) -> list[int]:
        return [self.damage.get(page, 0) for page in pages]

    def zero(self, pages: list[int]) -> None:
        self.zeroed += pages

    def close(self) -> None:
        self.closed = True


class FakeWitness:
    """Of one process; it dies when it is killed, unless it is ``immortal``."""

    def __init__(self, processes: FakeProcesses, pid: int) -> None:
        self._processes = processes
        self._pid = pid
        self.uid = processes.uids.get(pid, OWN_UID)
        self.own = self.uid == OWN_UID
        self.closed = False

    def gone(self) -> bool:
        if self.closed:
            raise ValueError(f"the witness of {self._pid} is closed")
        return self._pid not in self._processes.living

    def kill(self) -> bool:
        self._processes.killed.append(self._pid)
        if self._pid in self._processes.refusing:
            return False
        if self._pid not in self._processes.lingering:
            self._processes.kill(self._pid)
        return True

    def close(self) -> None:
        self.closed = True


OWN_UID = 1000


class FakeProcesses:
    """Processes of one namespace, "here", that live until ``kill``; ``uids`` has whose they are, if not the daemon's.

    Those ``refusing`` cannot be killed by the daemon, and those ``lingering`` do not end of it at once.
    """

    def __init__(self) -> None:
        self.living: set[int] = set()
        self.uids: dict[int, int] = {}
        self.killed: list[int] = []
        self.refusing: set[int] = set()
        self.lingering: set[int] = set()
        self.witnesses: list[FakeWitness] = []

    def kill(self, pid: int) -> None:
        self.living.discard(pid)

    def observe(self, process: Process) -> FakeWitness | None:
        if process.pid_namespace != "here":
            return None
        self.witnesses.append(FakeWitness(self, process.pid))
        return self.witnesses[-1]


class World:
    """A KvCache with everything around it in the test's hands."""

    def __init__(
        self,
        pages: int,
        *,
        page_size: int = 4,
        chain_hash: ChainHash = blake2b_chain,
        devices: int | None = None,
        **limits: object,
    ) -> None:
        self.layout = dataclasses.replace(LAYOUT, page_size=page_size)
        self.now = 1000.0
        self.processes = FakeProcesses()
        self.arenas: list[FakeArena] = []
        counter = itertools.count(1)
        settings: dict[str, object] = {"budget_bytes": 1 << 20, "pool_pages": pages, **limits}
        self.cache = KvCache(
            Limits(**settings),  # type: ignore[arg-type]
            epoch=7,
            clock=lambda: self.now,
            random_bytes=lambda n: next(counter).to_bytes(n, "little"),
            make_arena=self._make_arena,
            observe=self.processes.observe,
            chain_hash=chain_hash,
            devices=devices,
        )

    def _make_arena(self, layout: Layout, pages: int, slots: int, device: int | None) -> FakeArena:
        self.arenas.append(FakeArena(layout, pages, slots, device))
        return self.arenas[-1]

    def attached(
        self, pool_id: str = "pool", pid: int | None = None, *, seen: bool = True, **options: object
    ) -> Session:
        """A session that has proved its mapping, of a living process that the daemon can see or not."""
        process = None
        if pid is not None:
            if seen:
                self.processes.living.add(pid)
            process = Process(pid, 1, "here" if seen else "elsewhere")
        session = self.cache.open_session("test", pool_id, self.layout, process=process, **options)
        arena = self.cache.pool_of(session).arena
        arena.answers[session.canary_slot] = bytes(b ^ 0xFF for b in session.canary)  # type: ignore[attr-defined]
        return self.cache.attach_session(session.id, session.canary)

    def scrub(self, pool: Pool) -> None:
        """Take the checksums that are due, as ``services.kvcache.scrub.scrubber`` does."""
        assert pool.checksums is not None
        while due := pool.checksums.due(3):
            pool.checksums.learn(due, pool.arena.checksums([page for page, _ in due]))

    def verify(self, pool: Pool, pages: Iterable[int]) -> list[int]:
        """Verify pages, and remove what is found corrupted with its continuation; the corrupted ones."""
        assert pool.checksums is not None
        known = pool.checksums.verifiable(pages)
        corrupted = pool.checksums.verify(known, pool.arena.checksums([page for page, _ in known]))
        if corrupted:
            for _ in purge(pool, slice_pages=1):
                self.sound()
        return corrupted

    def sound(self) -> None:
        """Fail the test on any violation."""
        violations = list(check(self.cache))
        assert not violations, violations

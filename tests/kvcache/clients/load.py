"""Clients that use a daemon as engines do, all at once, and give up or cut off calls at random.

Each has a session and a mapping of the arena, writes K and V of its own making (a digest of the prefix up to each
token) and finds them again, or fails. It knows every page it may use, and so do all of them together: a page granted as
new while anybody has it in a block table is found at once.
"""

from __future__ import annotations

import mmap
import random
import threading
from collections.abc import Callable
from typing import Any

from rocmforge.kvcache.v1 import kvcache_pb2 as pb
from services.common import rpc
from services.common.errors import ServiceError
from tests.kvcache.cache.stateful.known_sequence import HALF, PAGE, SLOT, KnownSequence, Ledger, report_of, steps_of
from tests.kvcache.clients.calls import GivenUp, Line, Tally
from tests.kvcache.clients.messages import fork
from tests.kvcache.conftest import LAYOUT_PB

POOL = "load"
PAGES = 160
QUOTA = 14  # of every third client

#: Every client's texts begin with parts of these, so that prefixes are shared.
TEXTS = [[random.Random(at).randrange(1000) for _ in range(64)] for at in range(6)]


class Client(threading.Thread):
    """One engine. ``error`` is what it failed with."""

    def __init__(
        self,
        number: int,
        address: str,
        operations: int,
        seed: int,
        ledger: Ledger,
        tally: Tally,
        beat: Callable[[], None],
    ) -> None:
        super().__init__(name=f"client-{number}", daemon=True)
        self.error: BaseException | None = None
        self._random = random.Random(f"{seed}/{number}")
        self._line = Line(address, self._random, tally)
        self._operations = operations
        self._quota = QUOTA if number % 3 == 0 else None
        self._ledger = ledger
        self._tally = tally
        self._beat = beat
        self._live: dict[str, KnownSequence] = {}
        self._old: list[tuple[str, Any]] = []  # calls whose sequences or session are gone
        self._names = 0

    def run(self) -> None:
        try:
            self._open_session()
            kinds = [kind for kind, weight in self._kinds().items() for _ in range(weight)]
            for _ in range(self._operations):
                self._beat()
                self._random.choice(kinds)()
            self._remove(list(self._live))
        except BaseException as error:
            self.error = error

    def _kinds(self) -> dict[Callable[[], None], int]:
        return {
            self._open: 20,
            self._step: 40,
            self._report: 8,
            self._fork: 6,
            self._look: 6,
            self._remove_some: 10,
            self._ask_again_too_late: 6,
            self._list: 2,
            self._renew: 2,
            self._evict: 1,
            self._fsck: 1,
            self._open_in_vain: 1,
            self._begin_anew: 1,
        }

    # --- the session ---

    def _open_session(self) -> None:
        request = pb.OpenSessionRequest(client_name=self.name, pool_id=POOL, layout=LAYOUT_PB, pool_pages=PAGES)
        if self._quota is not None:
            request.max_pages = self._quota
        request.ttl.FromSeconds(600)
        opened = self._line.call("OpenSession", request, calmly=True)
        self._session = opened.session_id
        arena = opened.arena
        with open(arena.file_path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), arena.size_bytes)
        at = arena.canary_offset
        canary = self._memory[at : at + 32]
        self._memory[at + 32 : at + 64] = bytes(byte ^ 0xFF for byte in canary)
        self._until_answered("AttachSession", pb.AttachSessionRequest(session_id=self._session, seen=canary))

    def _begin_anew(self) -> None:
        self.close_session()
        self._old = [(name, request) for name, request in self._old if name != "CloseSession"][-20:]
        self._open_session()

    def close_session(self) -> None:
        """Close it with all that is open in it."""
        for text in self._live.values():
            self._check_content(text)
            self._ledger.cross_out(text.pages)
        request = pb.CloseSessionRequest(session_id=self._session)
        answer, again = self._until_answered("CloseSession", request)
        assert again or (answer.closed and answer.removed_sequences == len(self._live)), answer
        self._live.clear()
        self._memory.close()

    def _open_in_vain(self) -> None:
        """A session that its engine never hears of ends with its lease."""
        request = pb.OpenSessionRequest(client_name=self.name, pool_id=POOL, layout=LAYOUT_PB)
        request.ttl.FromSeconds(1)
        try:
            opened = self._line.call("OpenSession", request)
        except GivenUp:
            return
        self._until_answered("CloseSession", pb.CloseSessionRequest(session_id=opened.session_id))

    def _renew(self) -> None:
        answer, _ = self._until_answered("RenewSession", pb.RenewSessionRequest(session_id=self._session))
        assert answer.ttl.seconds == 600

    # --- sequences ---

    def _open(self) -> None:
        if len(self._live) >= 5:
            self._remove_some()
        random_ = self._random
        shared, own = random_.randrange(40), random_.randrange(1, 16)
        tokens = random_.choice(TEXTS)[:shared] + [random_.randrange(1000) for _ in range(own)]
        salt, prompt = random_.choice(["", "", "salt"]), random_.randint(1, len(tokens))
        text = KnownSequence(self._new_name(), salt, tokens, prompt)
        wanted = random_.randrange(6)
        self._tally.count("lookup_most", prompt)
        request = pb.AllocatePagesRequest(session_id=self._session, demands=[text.opening(wanted)])
        answered = self._answered_or_dropped("AllocatePages", request, [text.name])
        if answered is None:
            return
        response, again = answered
        [grant] = response.grants
        if grant.HasField("error"):
            self._check_refusal(grant.error)
            if again:
                self._remove([text.name])  # the call that was given up may still arrive, and find pages
            return
        self._tally.count("lookup_least", prompt)
        cached = grant.cached_tokens
        assert cached % PAGE == 0 and cached < prompt and grant.first_index == 0
        assert len(grant.page_ids) == len(grant.generations) == max(wanted, cached // PAGE)
        text.reported = text.run = cached
        for at, page in enumerate(grant.page_ids):
            if at < cached // PAGE:
                self._ledger.enter_shared(page)
            else:
                self._ledger.enter_new(page, self.name)
            text.pages.append(page)
        self._live[text.name] = text
        self._tally.count("hits", cached)
        self._check_content(text)

    def _step(self) -> None:
        """The step call, for several sequences; one more may be removed with it."""
        names = self._random.sample(list(self._live), min(len(self._live), self._random.randint(1, 4)))
        gone = [names.pop()] if len(names) > 1 and self._random.random() < 0.2 else []
        texts = [self._live[name] for name in names]
        more = {name: self._random.randrange(7) for name in names}
        steps = steps_of(texts, more)
        request = pb.AllocatePagesRequest(
            session_id=self._session, demands=[pb.Demand(steps=steps)], remove_sequence_ids=gone
        )
        for name in gone:
            self._let_go(name)
        answered = self._answered_or_dropped("AllocatePages", request, names + gone)
        if answered is None:
            return
        response, again = answered
        self._tally.count("removed_in_steps", len(gone))
        grants = {grant.sequence_id: grant for grant in response.grants}
        for text, wanted, known in zip(texts, steps.total_pages, steps.known_pages, strict=True):
            text.unsure |= again
            # One that is not told of has what it asked for.
            grant = grants.pop(text.name, pb.SequenceGrant(first_index=known))
            if grant.HasField("error"):
                self._check_refusal(grant.error)
                continue
            assert grant.first_index == known
            assert text.unsure or len(text.pages) + len(grant.page_ids) == max(wanted, known)
            text.reported = text.run
            for page in grant.page_ids:
                self._ledger.enter_new(page, self.name)
                text.pages.append(page)
            self._copy(text, grant.copies)
            self._run(text, more[text.name])
        assert not grants, f"{grants} were not asked for"

    def _copy(self, text: KnownSequence, copies: Any) -> None:
        for copy in copies:
            source, target = copy.source.page_id, copy.target.page_id
            if text.pages[copy.index] == target:
                continue  # told before
            if text.pages[copy.index] == source:
                self._ledger.enter_new(target, self.name)
                self._ledger.cross_out([source])
            text.pages[copy.index] = target
            self._memory[target * 2 * HALF : (target + 1) * 2 * HALF] = self._memory[
                source * 2 * HALF : (source + 1) * 2 * HALF
            ]

    def _run(self, text: KnownSequence, count: int) -> None:
        """Write K and V of the next tokens, where there is room."""
        end = min(text.run + count, len(text.pages) * PAGE, len(text.tokens))
        for at in range(text.run, end):
            k = self._place(text, at)
            self._memory[k : k + SLOT] = text.digest(at)
            self._memory[k + HALF : k + HALF + SLOT] = bytes(byte ^ 0xFF for byte in text.digest(at))
        text.run = max(text.run, end)

    def _check_content(self, text: KnownSequence) -> None:
        for at in range(text.run):
            k, want = self._place(text, at), text.digest(at)
            assert self._memory[k : k + SLOT] == want, f"{text.name}: K at {at} of {text.run} is somebody else's"
            v = self._memory[k + HALF : k + HALF + SLOT]
            assert v == bytes(byte ^ 0xFF for byte in want), f"{text.name}: V at {at} of {text.run} is somebody else's"

    @staticmethod
    def _place(text: KnownSequence, at: int) -> int:
        """Byte of K of a position: pages are [k, v][slot][head_dim] in this layout."""
        return text.pages[at // PAGE] * 2 * HALF + at % PAGE * SLOT

    def _report(self) -> None:
        texts = [text for text in self._live.values() if text.run > text.reported]
        if not texts:
            return
        request = pb.AppendTokensRequest(session_id=self._session, steps=report_of(texts))
        answered = self._answered_or_dropped("AppendTokens", request, [text.name for text in texts])
        if answered is not None:
            assert not answered[0].errors, answered[0]
            for text in texts:
                text.reported = text.run

    def _fork(self) -> None:
        parents = [text for text in self._live.values() if text.run == text.reported and not text.unsure]
        if not parents or len(self._live) >= 6:
            return
        parent = self._random.choice(parents)
        tokens = parent.tokens[: parent.run] + [self._random.randrange(1000) for _ in range(8)]
        child = KnownSequence(self._new_name(), parent.salt, tokens, 1)
        request = pb.AllocatePagesRequest(session_id=self._session, demands=[fork(child.name, parent.name)])
        answered = self._answered_or_dropped("AllocatePages", request, [child.name])
        if answered is None:
            return
        [grant] = answered[0].grants
        if grant.HasField("error"):
            error = rpc.error_from_status(grant.error)
            assert error.reason == "QUOTA_EXCEEDED" and self._quota, error
            self._remove([child.name])
            return
        assert grant.cached_tokens == parent.run and not grant.copies
        child.reported = child.run = parent.run
        child.pages = list(grant.page_ids)
        # But for the last one: a tail that the parent was told to copy is shared as it was before.
        assert child.pages[: parent.run // PAGE] == parent.pages[: parent.run // PAGE]
        for page in child.pages:
            self._ledger.enter_shared(page)
        self._live[child.name] = child
        self._check_content(child)

    def _look(self) -> None:
        if not self._live:
            return
        text = self._random.choice(list(self._live.values()))
        request = pb.GetSequenceRequest(session_id=self._session, sequence_id=text.name, include_tokens=True)
        answer, _ = self._until_answered("GetSequence", request)
        told = answer.sequence
        assert text.reported <= told.total_tokens <= text.run
        assert list(told.tokens) == text.tokens[: told.total_tokens]
        assert text.unsure or told.total_tokens == text.reported
        assert told.total_tokens // PAGE == told.published_pages
        assert text.unsure or list(told.page_ids) == text.pages
        assert len(told.page_ids) >= len(text.pages)

    def _list(self) -> None:
        answer, _ = self._until_answered("ListSequences", pb.ListSequencesRequest(session_id=self._session))
        assert {item.sequence_id for item in answer.sequences} == set(self._live)

    def _remove_some(self) -> None:
        names = list(self._live)
        self._remove(self._random.sample(names, min(len(names), self._random.randint(1, 2))))

    def _remove(self, names: list[str]) -> None:
        there = [name in self._live for name in names]
        for name in names:
            self._let_go(name)
        request = pb.RemoveSequencesRequest(session_id=self._session, sequence_ids=names)
        answer, again = self._until_answered("RemoveSequences", request)
        gone = [name for name, live in zip(names, there, strict=True) if live and name in answer.absent_sequence_ids]
        assert again or not gone, f"{gone} were not there any more"

    def _let_go(self, name: str) -> None:
        """Before the call that removes it."""
        text = self._live.pop(name, None)
        if text is not None:
            self._check_content(text)
            self._ledger.cross_out(text.pages)
            demands = [pb.Demand(steps=steps_of([text], {name: 2})), text.opening(3)]
            self._old += [
                ("AllocatePages", pb.AllocatePagesRequest(session_id=self._session, demands=demands)),
                ("AppendTokens", pb.AppendTokensRequest(session_id=self._session, steps=report_of([text]))),
            ]
            del self._old[:-20]

    def _ask_again_too_late(self) -> None:
        """Nothing brings a removed sequence or a closed session back."""
        if not self._old:
            return
        name, request = self._random.choice(self._old)
        try:
            response, _ = self._until_answered(name, request)
        except ServiceError as error:
            assert error.reason == "SESSION_EXPIRED" and request.session_id != self._session, error
            return
        assert request.session_id == self._session
        told = response.grants if name == "AllocatePages" else response.errors
        assert len(told) == (2 if name == "AllocatePages" else 1)
        for item in told:
            assert item.HasField("error"), f"{item.sequence_id} was removed and is back"
            assert rpc.error_from_status(item.error).reason == "SEQUENCE_REMOVED", item
        self._tally.count("too_late")

    # --- operators ---

    def _evict(self) -> None:
        self._until_answered("EvictPages", pb.EvictPagesRequest(pool_id=POOL, max_pages=3))

    def _fsck(self) -> None:
        answer, _ = self._until_answered("Fsck", pb.FsckRequest())
        assert not answer.violations, answer.violations

    # --- calls ---

    def _answered_or_dropped(self, name: str, request: Any, names: list[str]) -> tuple[Any, bool] | None:
        """The response and whether a call was given up before; None when its sequences were removed instead."""
        try:
            return self._line.call(name, request), False
        except GivenUp:
            if self._random.random() < 0.3:
                # As for a cancelled request: what is on its way must not bring them back.
                self._remove(names)
                self._tally.count("dropped", len(names))
                return None
        response, _ = self._until_answered(name, request)
        return response, True

    def _until_answered(self, name: str, request: Any) -> tuple[Any, bool]:
        """Again in the same words until there is a response; it, and whether a call was given up before."""
        again = False
        while True:
            self._beat()
            try:
                return self._line.call(name, request), again
            except GivenUp:
                again = True

    def _check_refusal(self, status: Any) -> None:
        error = rpc.error_from_status(status)
        assert error.reason == "NO_PAGES" or (error.reason == "QUOTA_EXCEEDED" and self._quota), error
        self._tally.count(error.reason)

    def _new_name(self) -> str:
        self._names += 1
        return f"s{self._names}"

"""The laws of docs/clients.md, each as a trial: it returns if the client keeps the law, and raises Failed otherwise."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from rocmforge.client.errors import SessionExpired
from rocmforge.conformance.proxy import Fault
from rocmforge.conformance.stage import LAYOUT, PROMPT, Stage
from rocmforge.conformance.subject import Failed, Refused

#: Seconds of a lease that is left to run out: a fifth of it is what a busy machine may take for a few lines.
FENCE_TTL_S = 5.0
#: Of one that is to be kept.
LEASE_TTL_S = 3.0
#: Seconds after which a client whose pages are being filled is to ask again, and for which it may wait.
FILL_S, FILL_WAIT_S = 0.3, 60.0


@dataclass(frozen=True, slots=True)
class Law:
    """``sentence`` continues "a client"."""

    name: str
    sentence: str
    trial: Callable[[Stage], None]


def attach(stage: Stage) -> None:
    """Offer memory that is shorter than announced, then memory that is not the daemon's."""

    def shorter(opened: Any) -> None:
        opened.arena.size_bytes *= 1000
        opened.arena.canary_offset = opened.arena.size_bytes - 64

    def other(opened: Any) -> None:
        arena = opened.arena
        if arena.file_path:
            copy = stage.folder / "copy"
            shutil.copyfile(arena.file_path, copy)
            arena.file_path = str(copy)
        else:
            arena.device_ipc_handle = stage.gpu_copy(arena.size_bytes)

    for edit in (shorter, other):
        stage.proxy.edit = edit
        try:
            stage.open()
        except Refused:
            pass
        else:
            raise Failed("it opened a session on memory that is not the daemon's")
        stage.until(lambda: stage.pool().sessions == 1, "it left the session open")
    stage.check(not stage.proxy.calls("AllocatePages"), "it asked for pages")
    stage.proxy.edit = None
    stage.open()


def places(stage: Stage) -> None:
    """Write six tokens into two pages."""
    stage.open()
    before = stage.arena()
    table = stage.begin("a", 2)
    stage.write("a", range(6), 21)
    for position in range(6):
        page, slot = table[position // 4], position % 4
        stage.check(stage.bytes_at(page, slot) == {21 + position}, f"position {position} is not in page {page}")
        read = stage.client.do("read", sequence="a", position=position)["bytes"]
        stage.check(read == bytes([21 + position] * 16).hex(), f"it reads {read} at position {position}")
    others = np.delete(stage.arena(), table, axis=0)
    stage.check(bool((others == np.delete(before, table, axis=0)).all()), "it wrote into pages that it was not granted")


def grants(stage: Stage) -> None:
    """Have it write beyond its pages, over resident tokens, and into a page that it shares."""
    stage.open()
    stage.begin("a", 2)
    stage.write("a", range(6), 31)
    before = stage.arena()
    stage.refused("write", sequence="a", position=8, byte=99)
    stage.step("a", PROMPT, 2)
    stage.refused("write", sequence="a", position=2, byte=99)
    answer = stage.client.do("begin", sequence="b", prompt=PROMPT, pages=2)
    stage.check(
        answer.get("cached_tokens") == 4, f"it says that {answer.get('cached_tokens')} tokens were cached, not 4"
    )
    stage.refused("write", sequence="b", position=1, byte=99)
    stage.check(bool((stage.arena() == before).all()), "it refused, and wrote all the same")


def publishing(stage: Stage) -> None:
    """Look whether anybody finds tokens before and after their step."""
    stage.open()
    stage.begin("a", 2)
    stage.write("a", range(6), 41)
    stage.check(stage.cached(PROMPT) == 0, "it reported tokens before their step was over")
    stage.step("a", PROMPT, 2)
    stage.check(stage.cached(PROMPT) == 4, "nobody finds what it reported")


def copies(stage: Stage) -> None:
    """Fork a sequence in the middle of a page, and continue both."""
    stage.open()
    first, second = stage.begin("a", 2)
    stage.write("a", range(6), 51)
    stage.step("a", PROMPT, 2)
    forked = stage.table(stage.again("fork", sequence="b", parent="a", pages=2), 2)
    stage.check(forked[0] == first, "the fork does not share the whole page")
    stage.check(forked[1] != second, "the fork goes on in its parent's page")
    stage.client.do("write", sequence="b", position=6, byte=77)
    stage.check(stage.bytes_at(second, 2) != {77}, "what the fork wrote is in its parent's page")
    for slot in range(2):
        stage.check(stage.bytes_at(forked[1], slot) == {55 + slot}, "the fork's page is no copy of its parent's")
    stage.check(stage.bytes_at(forked[1], 2) == {77}, "what the fork wrote is not in its own page")
    stage.client.do("write", sequence="a", position=6, byte=78)
    stage.check(stage.bytes_at(second, 2) == {78} and stage.bytes_at(forked[1], 2) == {77}, "both write one page")


def replies(stage: Stage) -> None:
    """Lose requests and replies, deliver one late and one twice."""
    stage.open()
    faults = (Fault.LOSE_REPLY, Fault.LOSE_REQUEST, Fault.REPEAT, Fault.DELAY_REPLY)
    for at, fault in enumerate(faults):
        name, prompt = f"s{at}", [at + 1] * 6
        stage.proxy.inject("AllocatePages", fault)
        stage.begin(name, 2, prompt)
        stage.write(name, range(6), 61)
        stage.proxy.inject("AllocatePages", fault)
        table = stage.step(name, prompt, 2)
        stage.check(stage.pool().held_pages == len(table), f"{fault.name}: it holds pages that it does not know of")
        stage.check(stage.cached(prompt) == 4, f"{fault.name}: nobody finds what it reported")
        stage.again("remove", sequence=name)
        stage.check(stage.pool().held_pages == 0, f"{fault.name}: pages of a removed sequence are still held")


def batches(stage: Stage) -> None:
    """Have one sequence of a batch refused."""
    stage.open()
    stage.begin("a", 2, [1] * 6)
    stage.begin("b", 2, [2] * 6)
    stage.write("b", range(6), 71)
    steps = [{"sequence": "a", "tokens": [], "pages": 1000}, {"sequence": "b", "tokens": [2] * 6, "pages": 3}]
    first, second = stage.client.do("step", steps=steps)["results"]
    stage.check(first.get("error") == "EXCEEDS_POOL", f"of a sequence that asked for too much it says {first}")
    stage.check("error" not in second, f"of the other it says {second.get('error')}")
    table = stage.table(second, 3)
    stage.client.do("write", sequence="b", position=8, byte=77)
    stage.check(stage.bytes_at(table[2], 0) == {77}, "the other sequence's new page is not the one that was granted")
    stage.check(stage.cached([2] * 6) == 4, "the other sequence's tokens were not reported")
    stage.step("a", [], 3)


def filling(stage: Stage) -> None:
    """Refuse a sequence for pages that are being filled, twice; and one with the first's last call unanswered."""
    stage.open()
    for at, fault in enumerate((None, Fault.LOSE_REPLY)):
        name, prompt = f"s{at}", [at + 1] * 6
        stage.proxy.filling = [FILL_S, FILL_S]
        if fault is not None:
            stage.proxy.inject("AllocatePages", fault)
        before = len(stage.proxy.calls("AllocatePages"))
        answer = stage.again("begin", sequence=name, prompt=prompt, pages=2, fill_wait_s=FILL_WAIT_S)
        stage.table(answer, 2)
        offers = [call for call in stage.proxy.calls("AllocatePages")[before:] if _offers(call.request, name)]
        sent = [call.at for call in offers if call.answered]
        stage.check(
            all(after - first >= FILL_S for first, after in pairwise(sent)), "it asks again sooner than it is to"
        )
        stage.check(
            not offers or not stage.proxy.filling, "it was refused for pages that are filled, and took that for pages"
        )
        stage.write(name, range(6), 45)
        stage.step(name, prompt, 2)
        stage.check(stage.cached(prompt) == 4, "nobody finds what it reported")


def _offers(request: Any, name: str) -> bool:
    openings = [demand.opening for demand in request.demands if demand.HasField("opening")]
    return any(opening.sequence_id == name and opening.HasField("fill_wait") for opening in openings)


def lease(stage: Stage) -> None:
    """Leave it alone for longer than its lease."""
    stage.open(LEASE_TTL_S)
    stage.begin("a", 2)
    time.sleep(1.5 * LEASE_TTL_S)
    stage.check(bool(stage.client.do("may_write")["may_write"]), "it does not keep its lease")
    stage.step("a", [], 3)


def fence(stage: Stage) -> None:
    """Let nothing be heard of the daemon, and have it write until it stops."""
    stage.open(FENCE_TTL_S)
    table = stage.begin("a", 2)
    stage.proxy.silence(True)
    over = max(call.at for call in stage.proxy.calls() if call.answered) + FENCE_TTL_S
    while True:
        try:
            stage.client.do("write", sequence="a", position=0, byte=81)
        except Refused:
            break
        stage.check(time.monotonic() < over, "it writes when its lease is over")
        time.sleep(0.02)
    stage.check(stage.bytes_at(table[0], 0) == {81}, "it never wrote")
    stage.check(not stage.client.do("may_write")["may_write"], "it refuses to write, and says that it may")
    stage.proxy.silence(False)


def loss(stage: Stage) -> None:
    """Let the daemon be restarted, and have the client recover."""
    stage.open()
    stage.begin("a", 2)
    stage.proxy.restart()
    reason = stage.refused("step", steps=[{"sequence": "a", "tokens": [], "pages": 3}])
    stage.check(reason == SessionExpired.reason, f"its session is gone, and it says {reason}")
    stage.refused("write", sequence="a", position=0, byte=91)
    stage.proxy.inject("CloseSession", Fault.LOSE_REPLY)  # then it is not heard to be closed
    stage.again("recover")
    lifetimes = [call for call in stage.proxy.calls("OpenSession", "CloseSession") if call.answered]
    order = [call.method for call in lifetimes]
    stage.check(
        order == ["OpenSession", "CloseSession", "OpenSession"],
        f"it has to close what it lost before it opens another: the calls were {', '.join(order)}",
    )
    lost = lifetimes[1].request.session_id
    late = [call for call in stage.proxy.calls("AllocatePages") if call.request.session_id == lost]
    stage.check(all(call.at < lifetimes[1].at for call in late), "it calls with a session that it has closed")
    stage.begin("a", 2)
    stage.write("a", range(6), 92)
    stage.step("a", PROMPT, 2)


def epoch(stage: Stage) -> None:
    """Answer as another run of the daemon would that knew the session."""
    stage.open()
    stage.begin("a", 2)
    stage.proxy.restart(sessions_end=False)
    reason = stage.refused("step", steps=[{"sequence": "a", "tokens": [], "pages": 2}])
    stage.check(reason == SessionExpired.reason, f"the epoch changed, and it says {reason}")
    stage.refused("write", sequence="a", position=0, byte=93)
    stage.again("recover")
    stage.begin("b", 2)


def stale(stage: Stage) -> None:
    """End a sequence, let another client have its pages, and have this one use them; then the same by a restart."""
    stage.open()
    stage.begin("a", 2)
    stage.write("a", range(6), 61)
    stage.step("a", PROMPT, 2)
    stage.client.do("remove", sequence="a")
    stage.take_all()
    before = stage.arena()
    for command, values in (("read", {}), ("write", {"byte": 99}), ("write", {"byte": 99, "position": 6})):
        stage.refused(command, **{"sequence": "a", "position": 0, **values})
    stage.check(bool((stage.arena() == before).all()), "it wrote into pages of a sequence that has ended")
    stage.give_back()
    answer = stage.client.do("begin", sequence="b", prompt=PROMPT, pages=2)
    stage.check(
        answer.get("cached_tokens") == 0,
        f"its pages were given to others, and it says that {answer.get('cached_tokens')} tokens are cached",
    )
    stage.proxy.restart()
    stage.refused("step", steps=[{"sequence": "b", "tokens": [], "pages": 2}])
    stage.again("recover")
    for command, values in (("read", {}), ("write", {"byte": 99})):
        stage.refused(command, sequence="b", position=0, **values)


def end(stage: Stage) -> None:
    """Have it close its session."""
    stage.open()
    stage.begin("a", 2)
    stage.write("a", range(6), 95)
    stage.step("a", PROMPT, 2)
    stage.client.do("close")
    stage.until(lambda: stage.pool().sessions == 1, "its session is still open")
    pool = stage.pool()
    stage.check((pool.held_pages, pool.quarantined_pages) == (0, 0), "pages of it are held, or in quarantine")
    stage.check(stage.cached(PROMPT) == LAYOUT.page_size, "what it published did not stay")


LAWS = (
    Law("attach", "uses no memory but the daemon's, which it proves", attach),
    Law("places", "writes K and V where they were granted", places),
    Law("grants", "writes nowhere else, and over no resident token", grants),
    Law("publishing", "reports tokens when their step is over, and then", publishing),
    Law("copies", "makes the copies that its grants list, and writes to no page of others", copies),
    Law("replies", "sends a call that was not answered again as it was", replies),
    Law("batches", "takes an error for the one sequence that it is of", batches),
    Law("filling", "asks again for a sequence whose pages are being filled, when it is told to", filling),
    Law("lease", "keeps its lease while it has nothing to do", lease),
    Law("fence", "stops writing before its lease can be over", fence),
    Law("loss", "closes a lost session before it opens another", loss),
    Law("epoch", "takes another epoch for the loss of its pages", epoch),
    Law("stale", "uses no page of a sequence that has ended", stale),
    Law("end", "ends its session, and leaves what it published", end),
)

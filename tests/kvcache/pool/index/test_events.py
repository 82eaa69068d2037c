"""The ring of events: numbers without holes, bounded, and honest about what is gone."""

from __future__ import annotations

from services.kvcache.pool.index.events import MAX_LINKS, EventKind, EventRing, Link


def add(ring: EventRing, count: int, kind: EventKind = EventKind.STORED, pool: str = "p") -> None:
    for at in range(count):
        ring.add(pool, kind, Link(at, 0))


def test_news_of_one_kind_are_one_event_until_read() -> None:
    ring = EventRing(10)
    add(ring, 3)
    gap, [event] = ring.after(0)
    assert not gap and event.number == 1 and len(event.links) == 3
    add(ring, 1)
    assert len(event.links) == 3, "an event that was read does not change"
    assert [e.number for e in ring.after(1)[1]] == [2]


def test_kinds_and_pools_do_not_mix_and_events_are_bounded() -> None:
    ring = EventRing(5000)
    add(ring, 1)
    add(ring, 1, EventKind.EVICTED)
    add(ring, 1, EventKind.EVICTED, pool="q")
    add(ring, MAX_LINKS + 1, EventKind.EXPIRED)
    _, events = ring.after(0)
    assert [len(event.links) for event in events] == [1, 1, 1, MAX_LINKS, 1]


def test_a_reader_behind_the_ring_sees_a_gap_and_one_at_its_end_does_not() -> None:
    ring = EventRing(3)
    for kind in [EventKind.STORED, EventKind.EVICTED] * 4:
        add(ring, 1, kind)
    assert ring.last_number == 8
    assert ring.after(4)[0] and not ring.after(5)[0]
    assert [event.number for event in ring.after(5)[1]] == [6, 7, 8]
    assert ring.after(8) == (False, [])
    assert ring.after(9)[0], "a number of another epoch"


def test_the_bound_is_on_links() -> None:
    ring = EventRing(100)
    for kind in [EventKind.STORED, EventKind.EVICTED] * 20:
        add(ring, 10, kind)
    assert sum(len(event.links) for event in ring.after(ring.last_number - 10)[1]) == 100
    assert ring.after(ring.last_number - 11)[0]


def test_what_is_kept_is_in_order() -> None:
    ring = EventRing(100)
    add(ring, 2)
    add(ring, 2, EventKind.EVICTED)
    ring.add("p", EventKind.STORED, Link(0, 0))
    ring.add("q", EventKind.EVICTED, Link(5, 0))
    kept = [(event.pool_id, event.kind, [link.hash for link in event.links]) for event in ring.kept()]
    assert kept == [
        ("p", EventKind.STORED, [0, 1]),
        ("p", EventKind.EVICTED, [0, 1]),
        ("p", EventKind.STORED, [0]),
        ("q", EventKind.EVICTED, [5]),
    ]


def test_limit() -> None:
    ring = EventRing(10)
    for kind in [EventKind.STORED, EventKind.EVICTED] * 2:
        add(ring, 1, kind)
    assert [event.number for event in ring.after(1, limit=2)[1]] == [2, 3]


def test_listeners_hear_of_new_events_until_they_leave() -> None:
    ring, heard = EventRing(10), list[int]()
    leave = ring.subscribe(lambda: heard.append(1))
    add(ring, 5)
    assert heard == [1]
    leave()
    ring.after(0)
    add(ring, 1)
    assert heard == [1]

"""Routers get a true picture of the prefix caches, whatever they miss and whichever engines come and go."""

from __future__ import annotations

import contextlib
import random
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rocmforge.kvcache.v1 import kvcache_pb2 as pb
from services.common.errors import InvalidConfiguration
from services.kvcache.config import Config
from services.kvcache.kvevents import chains, journal
from services.kvcache.kvevents.publisher import KvEventPublisher
from tests.kvcache.clients.messages import opening, step
from tests.kvcache.conftest import Running
from tests.kvcache.kvevents.reader import Block, Reader
from tests.loopback import own_host
from tests.polling import until

FLAGS = ("--kv-events", "127.0.0.1:0", "--kv-events-replay", "127.0.0.1:0")
Blocks = dict[str, dict[int, Block]]


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    with contextlib.closing(Running(tmp_path, *FLAGS)) as one:
        yield one


def publisher(running: Running) -> KvEventPublisher:
    found = running.daemon.kv_events
    assert found is not None
    return found


def reader_of(running: Running, **options: Any) -> Reader:
    return Reader(publisher(running).bound, publisher(running).replay_bound, **options)


def publish(running: Running, session: str, name: str, tokens: list[int], salt: str = "") -> None:
    """A sequence that computes a prompt and ends."""
    prompt = [*tokens, 0]
    requests = [
        [opening(name, prompt, len(prompt) // 4 + 1, salt=salt)],
        [step(name, 0, tokens, len(prompt) // 4 + 1, len(prompt) // 4 + 1)],
    ]
    for demands in requests:
        running.stub.AllocatePages(pb.AllocatePagesRequest(session_id=session, demands=demands))
    running.stub.RemoveSequences(pb.RemoveSequencesRequest(session_id=session, sequence_ids=[name]))


def truth(running: Running) -> tuple[Blocks, int]:
    """What readers have to know, and the number of the message after which they do."""

    async def body() -> tuple[Blocks, int] | None:
        said, cache = publisher(running), running.daemon.cache
        if said._changed.is_set() or said._lock.locked():
            return None
        found: Blocks = {}
        for session in cache.attached_sessions():
            index = cache.pool_of(session).index
            blocks = found.setdefault(f"kv@{session.engine_name or session.client_name or session.handle}@pool", {})
            for link in index.links():
                content = index.content(link.hash)
                assert content is not None
                tokens, salt = content
                blocks[link.hash] = (link.parent if salt is None else None, tuple(array("I", tokens)), salt or "")
        return found, said._journal.next - 1

    found: tuple[Blocks, int] = until(lambda: running.call(body))
    return found


def follow(running: Running, *readers: Reader) -> Blocks:
    """Have all readers read to the end; they know what is true then."""
    deadline = time.monotonic() + 60
    while True:
        for reader in readers:
            while reader.read(0.02):
                pass
        # A reader that connects is a reason to publish, and its last messages may be those that it missed.
        blocks, number = truth(running)
        late = [reader for reader in readers if number >= 0 and reader.last != number]
        if not late:
            break
        for reader in late:
            if not reader.read(0.1):
                reader.catch_up()
        assert time.monotonic() < deadline, f"read to {[reader.last for reader in readers]}, not to {number}"
    for reader in readers:
        assert {topic: known for topic, known in reader.blocks.items() if known} == {
            topic: known for topic, known in blocks.items() if known
        }
    return blocks


def test_a_reader_learns_what_is_cached_with_tokens_parents_and_salts(running: Running) -> None:
    early = reader_of(running)
    session = running.session(engine_name="one", model="pool")
    publish(running, session, "a", [1, 2, 3, 4, 5, 6, 7, 8])
    publish(running, session, "b", [1, 2, 3, 4, 9, 9, 9, 9], salt="tenant")
    late = reader_of(running)
    [blocks] = follow(running, early, late).values()
    assert sorted(tokens for _, tokens, _ in blocks.values()) == [
        (1, 2, 3, 4),
        (1, 2, 3, 4),
        (5, 6, 7, 8),
        (9, 9, 9, 9),
    ]
    assert sorted(salt for parent, _, salt in blocks.values() if parent is None) == ["", "tenant"]
    assert sum(parent in blocks for parent, _, _ in blocks.values()) == 2
    assert early.media == late.media == {"CPU"}
    early.close()
    late.close()


def test_pages_of_a_shared_pool_are_under_each_engine_and_go_when_it_leaves(running: Running) -> None:
    reader = reader_of(running)
    one = running.session(engine_name="one", model="pool")
    publish(running, one, "a", [1, 2, 3, 4])
    two = running.session(engine_name="two", model="pool")
    publish(running, two, "b", [5, 6, 7, 8])
    blocks = follow(running, reader)
    assert set(blocks) == {"kv@one@pool", "kv@two@pool"} and len(blocks["kv@one@pool"]) == 2
    assert blocks["kv@one@pool"] == blocks["kv@two@pool"]
    running.stub.CloseSession(pb.CloseSessionRequest(session_id=one))
    assert set(follow(running, reader)) == {"kv@two@pool"} and not reader.blocks["kv@one@pool"]
    running.now += 100
    running.sweep()
    assert follow(running, reader) == {} and not reader.blocks["kv@two@pool"]
    reader.close()


def test_who_has_not_attached_has_no_topic(running: Running) -> None:
    layout = pb.PageLayout(page_size=4, layers=1, kv_heads=1, head_dim=4, data_type=pb.DATA_TYPE_F32)
    running.stub.OpenSession(pb.OpenSessionRequest(pool_id="pool", pool_pages=8, layout=layout, engine_name="one"))
    assert truth(running) == ({}, -1) and publisher(running).published == 0


def test_two_sessions_of_one_name_share_a_topic(running: Running) -> None:
    reader = reader_of(running)
    first = running.session(engine_name="one", model="pool")
    publish(running, first, "a", [1, 2, 3, 4])
    running.session(engine_name="one", model="pool")
    running.stub.CloseSession(pb.CloseSessionRequest(session_id=first))
    assert len(follow(running, reader)["kv@one@pool"]) == 1
    reader.close()


def test_names_without_one_and_names_with_an_at_sign(running: Running) -> None:
    reader = reader_of(running)
    running.session("pool@0123", client_name="an engine")
    running.session("other", engine_name="a@b", model="m@n")
    until(lambda: reader.read(1) and set(reader.blocks) == {"kv@an engine@pool", "kv@a_b@m_n"})
    reader.close()


def test_the_old_format(tmp_path: Path) -> None:
    with contextlib.closing(Running(tmp_path, *FLAGS, "--kv-events-format", "array")) as running:
        reader = reader_of(running, form="array")
        session = running.session(engine_name="one", model="pool")
        for at in range(6):
            publish(running, session, f"s{at}", [*range(8 * at, 8 * at + 8)], salt="s")
        assert follow(running, reader)["kv@one@pool"]
        reader.close()


@pytest.mark.parametrize("seed", range(4))
def test_any_reader_knows_the_truth_whatever_it_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Evictions, expiry, engines that come, end and are lost, messages that are missed, replays of more than is kept,
    and numbers that begin again.
    """
    chance = random.Random(seed)
    monkeypatch.setattr(journal, "MOST", chance.choice([40, 1000]))
    monkeypatch.setattr(journal, "LEAST_KEPT", chance.choice([3, 1000]))
    monkeypatch.setattr(chains, "MOST_TOKENS", 8)
    monkeypatch.setattr("services.kvcache.kvevents.publisher.KEPT_BYTES", 0)
    ring = chance.choice(["4", "1000"])  # so short that the publisher itself loses events
    running = Running(tmp_path, *FLAGS, "--cache-ttl", "50", "--event-ring", ring)
    publisher(running)._journal._most_bytes = 0
    with contextlib.closing(running):
        sessions: dict[str, str] = {}
        readers = [reader_of(running), reader_of(running)]

        def attach() -> None:
            name = f"e{chance.randrange(3)}"
            if name not in sessions:
                sessions[name] = running.session(engine_name=name, model="pool")

        def leave() -> None:
            if sessions:
                name = chance.choice(sorted(sessions))
                running.stub.CloseSession(pb.CloseSessionRequest(session_id=sessions.pop(name)))

        def lose() -> None:
            running.now += 20
            running.sweep()
            sessions.clear()

        def compute() -> None:
            if sessions:
                session = sessions[chance.choice(sorted(sessions))]
                # Few different prompts that begin alike, so that pages are shared, evicted and cached again.
                tokens = [token for _ in range(chance.randrange(1, 4)) for token in [chance.randrange(3)] * 4]
                salt = chance.choice(["", "", "x"])
                publish(running, session, f"q{chance.randrange(10**9)}", tokens, salt)

        def evict() -> None:
            if sessions:
                most = chance.randrange(1, 5)
                running.stub.EvictPages(pb.EvictPagesRequest(pool_id="pool", max_pages=most))

        def miss() -> None:
            chance.choice(readers).miss()

        def read() -> None:
            chance.choice(readers).read(0)

        def check() -> None:
            follow(running, *readers)

        doing = [attach, compute, compute, compute, compute, miss, miss, read, read, evict, leave, lose, check]
        weights = [4, 6, 6, 6, 6, 2, 2, 4, 4, 3, 1, 1, 2]
        for act in chance.choices(doing, weights, k=120):
            act()
        late = reader_of(running)
        follow(running, *readers, late)
        for reader in (*readers, late):
            reader.close()


def test_a_replay_of_more_than_is_kept_clears_the_engines_that_left(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "LEAST_KEPT", 2)
    publisher(running)._journal._most_bytes = 0
    reader = reader_of(running)
    gone = running.session(engine_name="gone", model="pool")
    publish(running, gone, "a", [1, 2, 3, 4])
    assert len(follow(running, reader)["kv@gone@pool"]) == 1
    running.stub.CloseSession(pb.CloseSessionRequest(session_id=gone))
    truth(running)
    session = running.session(engine_name="one", model="pool")
    for at in range(4):
        publish(running, session, f"s{at}", [at] * 4)
        truth(running)
    reader.catch_up()  # of all that it has not read
    assert not reader.blocks["kv@gone@pool"] and len(reader.blocks["kv@one@pool"]) == 5
    reader.close()


def test_a_new_run_of_the_daemon_is_seen_by_its_numbers(tmp_path: Path) -> None:
    host = own_host()
    one = Running(tmp_path, "--kv-events", f"{host}:0", "--kv-events-replay", f"{host}:0")
    address, replay = publisher(one).bound, publisher(one).replay_bound
    reader = reader_of(one)
    session = one.session(engine_name="one", model="pool")
    for at in range(4):
        publish(one, session, f"s{at}", [at] * 4)
        follow(one, reader)
    one.close()
    flags = ("--kv-events", address, "--kv-events-replay", replay)
    with contextlib.closing(Running(tmp_path, *flags)) as two:
        until(lambda: reader.read(1) and reader.resets)
        publish(two, two.session(engine_name="one", model="pool"), "t", [7] * 4)
        blocks = follow(two, reader)
        assert [tokens for _, tokens, _ in blocks["kv@one@pool"].values()] == [(7, 7, 7, 7)]
    reader.close()


def test_a_replay_of_what_is_kept_is_what_was_published(running: Running) -> None:
    reader = reader_of(running)
    session = running.session(engine_name="one", model="pool")
    for at in range(5):
        publish(running, session, f"s{at}", [at] * 4)
        truth(running)
    _, number = truth(running)
    told = reader.replayed(0)
    assert [message.number for message in told] == [*range(number + 1)] and number >= 5
    assert reader.replayed(3) == told[3:]
    assert reader.replayed(number + 1) == [] == reader.replayed(1 << 63)
    reader.close()


def test_a_request_that_is_none_is_ignored(running: Running) -> None:
    import zmq

    reader = reader_of(running)
    running.session(engine_name="one", model="pool")
    truth(running)
    dealer = reader._context.socket(zmq.DEALER)
    dealer.connect(f"tcp://{publisher(running).replay_bound}")
    for frames in ([b""], [b"", b"x"], [b"x" * 100], [b"", b"", b"", b"", b"1"]):
        dealer.send_multipart(frames)
    assert reader.replayed(0), "and others are answered"
    dealer.close(linger=0)
    reader.close()


def test_events_are_small(running: Running) -> None:
    """No event takes longer to make than some thousand tokens do, since nothing else runs meanwhile."""
    session = running.session("large", engine_name="one", pool_pages=4096, model="pool")
    for at in range(4):
        publish(running, session, f"s{at}", [*range(4000 * at, 4000 * at + 4000)])

    async def sizes() -> list[int]:
        [pool] = running.daemon.cache.pools
        found = chains.stored(pool, chains.parents_first(pool.index.frozen()))
        return [len(event.token_ids) for event in found if event is not None]

    made = running.call(sizes)
    assert sum(made) == 16000 and max(made) <= chains.MOST_TOKENS


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--kv-events", "0.0.0.0:5557"), "--kv-events 0.0.0.0:5557: other hosts could read the tokens"),
        (
            ("--kv-events", "127.0.0.1:0", "--kv-events-replay", "10.0.0.1:1"),
            "--kv-events-replay 10.0.0.1:1: other hosts",
        ),
        (("--kv-events-replay", "127.0.0.1:0"), "--kv-events-replay needs --kv-events"),
        (("--kv-events-format", "json"), "--kv-events-format json: expected map or array"),
        (("--kv-events", "unix:/run/x"), "--kv-events unix:/run/x: expected host:port"),
    ],
)
def test_settings_that_cannot_be(flags: tuple[str, ...], says: str) -> None:
    with pytest.raises(InvalidConfiguration) as caught:
        Config.read([*flags], {})
    assert says in caught.value.message


def test_an_address_that_is_taken(tmp_path: Path, running: Running) -> None:
    with pytest.raises(InvalidConfiguration, match=r"--kv-events 127.0.0.1:\d+: cannot bind"):
        Running(tmp_path / "other", "--kv-events", publisher(running).bound)

"""The outer tier on a real server, with every fault of it: the page that was stored, or none, and in time."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import trustme

from services.kvcache.outer.connection import OuterError
from services.kvcache.outer.page_chain import Chain
from services.kvcache.outer.settings import OuterTier
from services.kvcache.outer.store import PREFIX, OuterStore
from services.kvcache.outer.value import Codec, InvalidValue
from tests.kvcache.outer.servers import WAIT_S, Cutting, RedisServer, settings, until

pytestmark = pytest.mark.needs("redis")

KEY = bytes(range(32))
PAGE = os.urandom(256 << 10)


def chains(count: int) -> list[Chain]:
    found, parent = [], bytes(32)
    for at in range(count):
        tokens = at.to_bytes(4, "little") * 16
        digest = hashlib.sha256(parent + tokens).digest()
        found.append(Chain(digest, parent, tokens))
        parent = digest
    return found


[FIRST, SECOND, THIRD, *_] = CHAINS = chains(200)


@dataclass
class Tier:
    """A store, and what it said of its health."""

    outer: OuterTier
    codec: Codec = field(default_factory=lambda: Codec(KEY))
    said: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.store = OuterStore(self.outer, self.codec, lambda up, _: self.said.append(up))

    def put(self, chain: Chain, page: bytes = PAGE) -> None:
        value = memoryview(bytearray(self.codec.value_bytes(len(page), chain)))
        self.codec.seal(memoryview(bytearray(page + bytes(len(chain.tokens)))), chain, value)
        self.store.store(chain.digest, value)

    def get(self, chain: Chain, page_bytes: int = len(PAGE)) -> bytes | None:
        value = memoryview(bytearray(self.codec.value_bytes(page_bytes, chain)))
        body = bytearray(self.codec.body_bytes(page_bytes, chain))
        return bytes(body[:page_bytes]) if self.store.fetch(chain, value, memoryview(body)) else None

    def until(self, work: Callable[[], Any]) -> Any:
        """What the work returns once it raises no OuterError any more."""
        found: list[Any] = []

        def works() -> bool:
            with contextlib.suppress(OuterError):
                found.append(work())
            return bool(found)

        until(works, "the outer tier does not come back")
        return found[0]

    def open_the_breaker(self) -> None:
        deadline = time.monotonic() + WAIT_S
        while not self.store._reads.is_open:
            assert time.monotonic() < deadline
            with pytest.raises(OuterError):
                self.get(FIRST)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path / "redis")
    yield server
    server.kill()


@pytest.fixture
def tier(server: RedisServer) -> Iterator[Tier]:
    tier = Tier(settings(server.port))
    yield tier
    tier.store.close()


def test_a_page_comes_back_and_expires(server: RedisServer, tier: Tier) -> None:
    tier.put(FIRST)
    assert tier.get(FIRST) == PAGE
    assert tier.get(SECOND) is None
    assert 0 < int(server.command("TTL", PREFIX + FIRST.digest)[1:]) <= 100
    assert tier.said == [True]


def test_a_lookup_counts_up_to_the_first_gap(tier: Tier) -> None:
    for at in (0, 1, 2, 4):
        tier.put(CHAINS[at], b"page")
    digests = [chain.digest for chain in CHAINS]
    assert tier.store.lookup(digests) == 3
    assert tier.store.lookup(digests[4:]) == 1
    assert tier.store.lookup(digests[5:]) == 0
    tier.store.forget([FIRST.digest, SECOND.digest])
    assert tier.store.lookup(digests) == 0


def test_nothing_readable_is_stored(server: RedisServer, tier: Tier) -> None:
    tier.put(FIRST)
    value = server.command("GET", PREFIX + FIRST.digest)
    assert len(value) > len(PAGE) and FIRST.tokens not in value and PAGE[:32] not in value


def test_a_server_that_dies_is_left_alone_and_used_again_when_it_is_back(server: RedisServer, tier: Tier) -> None:
    tier.put(FIRST)
    server.kill()
    begun = time.monotonic()
    tier.open_the_breaker()
    assert time.monotonic() - begun < 3 * 2 * tier.outer.operation_seconds + 5
    assert tier.said == [True, False]
    begun = time.monotonic()
    for work in (lambda: tier.get(FIRST), lambda: tier.store.lookup([FIRST.digest])):
        with pytest.raises(OuterError, match="left alone"):
            work()
    assert time.monotonic() - begun < 0.3
    server.start()
    assert tier.until(lambda: tier.get(FIRST)) is None
    tier.until(lambda: tier.put(FIRST))
    assert tier.get(FIRST) == PAGE
    assert tier.said == [True, False, True]


def test_no_server_at_all_is_reported_at_the_first_operation(tmp_path: Path, server: RedisServer) -> None:
    server.kill()
    tier = Tier(settings(server.port))
    with pytest.raises(OuterError):
        tier.store.check()
    assert tier.said == [False]


def test_a_server_that_does_not_answer_takes_no_longer_than_the_limit(server: RedisServer) -> None:
    tier = Tier(settings(server.port, operation_seconds=0.5))
    tier.put(FIRST)
    server.stop()
    try:
        for work in (lambda: tier.get(FIRST), lambda: tier.put(SECOND), lambda: tier.store.lookup([FIRST.digest])):
            begun = time.monotonic()
            with pytest.raises(OuterError):
                work()
            # Connecting and asking, and what a busy machine adds.
            assert time.monotonic() - begun < 2 * 0.5 + 1.5
        tier.open_the_breaker()
    finally:
        server.resume()
    assert tier.until(lambda: tier.get(FIRST)) == PAGE


def test_a_value_that_trickles_takes_no_longer_than_the_limit(server: RedisServer) -> None:
    """Each packet comes in time, and there are always more."""
    proxy = Cutting(server.port)
    tier = Tier(settings(proxy.port, operation_seconds=0.5))
    tier.put(FIRST)
    proxy.delay_s = 0.3
    begun = time.monotonic()
    with pytest.raises(OuterError):
        tier.get(FIRST)
    assert time.monotonic() - begun < 2 * 0.5 + 1.5
    proxy.delay_s = 0.0
    assert tier.until(lambda: tier.get(FIRST)) == PAGE
    proxy.close()


def test_a_late_write_is_the_page_or_nothing(server: RedisServer) -> None:
    """The caller's memory is written again while the server has yet to read what was sent."""
    tier = Tier(settings(server.port, operation_seconds=0.5))
    tier.store.check()
    size = tier.codec.value_bytes(len(PAGE), FIRST)
    value = memoryview(bytearray(size))
    tier.codec.seal(memoryview(bytearray(PAGE + bytes(64))), FIRST, value)
    server.stop()
    try:
        with pytest.raises(OuterError):
            tier.store.store(FIRST.digest, value)
        value[:] = bytes(size)
    finally:
        server.resume()
    assert tier.until(lambda: tier.get(FIRST)) in (PAGE, None)


def test_a_full_server_refuses_to_store_and_is_still_read(server: RedisServer, tier: Tier) -> None:
    tier.put(FIRST)
    assert server.command("CONFIG", "SET", "maxmemory-policy", "noeviction") == b"+OK"
    assert server.command("CONFIG", "SET", "maxmemory", "1mb") == b"+OK"
    for _ in range(5):
        with pytest.raises(OuterError):
            tier.put(SECOND)
    with pytest.raises(OuterError, match=r"left alone.*OOM"):
        tier.put(SECOND)
    assert tier.get(FIRST) == PAGE
    assert tier.said == [True]
    server.command("CONFIG", "SET", "maxmemory", "0")
    tier.until(lambda: tier.put(SECOND))
    assert tier.get(SECOND) == PAGE


def test_a_server_that_cannot_save_refuses_to_store_and_is_still_read(server: RedisServer, tier: Tier) -> None:
    tier.put(FIRST)
    shutil.rmtree(server.folder)
    server.command("CONFIG", "SET", "save", "900 1")
    server.command("BGSAVE")
    until(lambda: server.command("SET", "probe", "1").startswith(b"-MISCONF"), "it saves where there is no folder")
    with pytest.raises(OuterError, match="MISCONF"):
        tier.put(SECOND)
    assert tier.get(FIRST) == PAGE


def test_a_password_is_needed_and_read_from_its_file(tmp_path: Path, server: RedisServer) -> None:
    server.kill()
    server.start("--requirepass", "s3cret")
    file = tmp_path / "password"
    file.touch(0o600)
    tier = Tier(settings(server.port, password_file=str(file)))
    for password, works in (("", False), ("wrong\n", False), ("s3cret\n", True)):
        file.write_text(password)
        if works:
            tier.until(lambda: tier.put(FIRST))
        else:
            with pytest.raises(OuterError):
                tier.put(FIRST)
    assert tier.get(FIRST) == PAGE
    with pytest.raises(OuterError, match="NOAUTH"):
        Tier(settings(server.port)).get(FIRST)
    file.chmod(0o644)
    with pytest.raises(OuterError, match="0644"):
        Tier(settings(server.port, password_file=str(file))).get(FIRST)


def test_a_server_that_became_a_replica_is_not_written(server: RedisServer, tier: Tier, tmp_path: Path) -> None:
    tier.put(FIRST)
    primary = RedisServer(tmp_path / "primary")
    try:
        server.command("REPLICAOF", "127.0.0.1", str(primary.port))
        with pytest.raises(OuterError):
            tier.put(SECOND)
        server.command("REPLICAOF", "NO", "ONE")
        tier.until(lambda: tier.put(SECOND))
        assert tier.get(SECOND) == PAGE
    finally:
        primary.kill()


def test_lost_data_is_a_miss(server: RedisServer, tier: Tier) -> None:
    tier.put(FIRST)
    server.command("FLUSHALL")
    assert tier.get(FIRST) is None
    assert tier.store.lookup([FIRST.digest]) == 0


@pytest.mark.parametrize("change", ["garbage", "short", "long", "one bit", "another page's", "empty", "a list"])
def test_wrong_bytes_are_refused_and_deleted(server: RedisServer, tier: Tier, change: str) -> None:
    key = PREFIX + FIRST.digest
    tier.put(FIRST)
    tier.put(SECOND)
    value = server.command("GET", key)
    changed = {
        "garbage": os.urandom(len(value)),
        "short": value[:-1],
        "long": value + b"\0" * 4096,
        "one bit": value[:1000] + bytes([value[1000] ^ 1]) + value[1001:],
        "another page's": server.command("GET", PREFIX + SECOND.digest),
        "empty": b"",
    }
    server.command("DEL", key)
    if change == "a list":
        server.command("LPUSH", key, "a")
    else:
        assert server.command("SET", key, changed[change]) == b"+OK"
    for _ in range(5):  # nor is the server given up for it
        with pytest.raises(InvalidValue):
            tier.get(FIRST)
        assert tier.get(FIRST) is None
        assert server.command("EXISTS", key) == b":0"
        if change == "a list":
            server.command("LPUSH", key, "a")
        else:
            server.command("SET", key, changed[change])
    assert tier.get(SECOND) == PAGE and tier.said == [True]


def test_a_connection_that_is_reset_in_the_middle_of_a_value_is_no_page(server: RedisServer) -> None:
    proxy = Cutting(server.port)
    tier = Tier(settings(proxy.port, connections=1))
    tier.put(FIRST)
    for cut_after in (1, 20, 5000, len(PAGE) - 1, len(PAGE) + 100):
        proxy.cut_after = cut_after
        with pytest.raises(OuterError):
            tier.get(FIRST)
        proxy.cut_after = None
        assert tier.until(lambda: tier.get(FIRST)) == PAGE
    proxy.close()


@pytest.mark.parametrize("lost", [False, True])
def test_a_connection_that_was_lost_is_closed_and_never_used_again(lost: bool) -> None:
    """What the library still has in flight on it goes with it, and the address is looked up anew."""
    made: list[Any] = []

    class Broken:
        closed = False
        fails = True

        def __init__(self, _: OuterTier) -> None:
            made.append(self)

        def exist(self, keys: Sequence[bytes]) -> list[bool]:
            assert not self.closed
            if self.fails:
                raise OuterError("refused", lost=lost)
            return [True for _ in keys]

        def close(self) -> None:
            self.closed = True

    store = OuterStore(settings(1, connections=1), Codec(None), lambda *_: None, connect=Broken)  # type: ignore[arg-type]
    with pytest.raises(OuterError, match="refused"):
        store.lookup([FIRST.digest])
    Broken.fails = False
    assert store.lookup([FIRST.digest]) == 1
    assert [each.closed for each in made] == ([True, False] if lost else [False])


def test_so_many_operations_at_a_time_and_no_more(server: RedisServer) -> None:
    proxy = Cutting(server.port)
    tier = Tier(settings(proxy.port, connections=2))
    tier.put(FIRST)
    seen: list[bytes | None] = []
    threads = [threading.Thread(target=lambda: seen.append(tier.get(FIRST))) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [PAGE] * 12
    assert proxy.connections <= 2
    proxy.close()


def test_a_cluster_has_the_pages_of_a_chain_on_any_node(tmp_path: Path) -> None:
    server = RedisServer(tmp_path / "node", "--cluster-enabled", "yes")
    try:
        assert server.command("CLUSTER", "ADDSLOTSRANGE", "0", "16383") == b"+OK"
        until(lambda: b"cluster_state:ok" in server.command("CLUSTER", "INFO"), "the cluster does not come up")
        tier = Tier(settings(server.port, cluster=True))
        for chain in CHAINS[:20]:
            tier.until(lambda chain=chain: tier.put(chain, b"page"))  # type: ignore[misc]
        assert tier.store.lookup([chain.digest for chain in CHAINS]) == 20
        assert tier.get(FIRST, 4) == b"page"
        tier.store.forget([chain.digest for chain in CHAINS[10:]])
        assert tier.store.lookup([chain.digest for chain in CHAINS]) == 10
        tier.store.close()
    finally:
        server.kill()


def test_over_tls_the_server_must_have_a_certificate_of_the_authority(tmp_path: Path, server: RedisServer) -> None:
    authority, other = trustme.CA(), trustme.CA()
    certificate = authority.issue_cert("127.0.0.1", "localhost")
    files = {name: tmp_path / name for name in ("ca.pem", "other.pem", "cert.pem", "key.pem")}
    authority.cert_pem.write_to_path(files["ca.pem"])
    other.cert_pem.write_to_path(files["other.pem"])
    certificate.cert_chain_pems[0].write_to_path(files["cert.pem"])
    certificate.private_key_pem.write_to_path(files["key.pem"])
    server.kill()
    server.start(
        *("--port", "0", "--tls-port", str(server.port), "--tls-auth-clients", "no"),
        *("--tls-cert-file", str(files["cert.pem"]), "--tls-key-file", str(files["key.pem"])),
        *("--tls-ca-cert-file", str(files["ca.pem"])),
    )
    tier = Tier(settings(server.port, tls=True, ca_file=str(files["ca.pem"])))
    tier.put(FIRST)
    assert tier.get(FIRST) == PAGE
    for wrong in (
        settings(server.port, tls=True, ca_file=str(files["other.pem"])),
        settings(server.port, tls=True),
        settings(server.port),
        settings(server.port, tls=True, ca_file=str(tmp_path / "absent.pem")),
    ):
        with pytest.raises(OuterError):
            Tier(wrong).get(FIRST)

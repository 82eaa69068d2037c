"""A client in hands that do not know it: forks, numbers out of range, batches that no message can carry."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rocmforge.client.cache import KvCache
from rocmforge.client.demands import STEP_SEQUENCES, Demand, Retention
from rocmforge.client.errors import InvalidConfiguration, SessionExpired
from rocmforge.client.layout import PageLayout
from rocmforge.client.lease import Lease, LeaseKeeper
from rocmforge.kvcache.v1 import kvcache_pb2 as pb
from tests.engine.fakes import Clock
from tests.kvcache.conftest import Running

LAYOUT = PageLayout(4, layers=2, kv_heads=1, head_dim=2, dtype="f32")


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Running]:
    one = Running(tmp_path)
    yield one
    one.close()


@pytest.fixture
def cache(daemon: Running) -> Iterator[KvCache]:
    with KvCache.connect(str(daemon.config.listeners[0]), "pool", LAYOUT, pool_pages=8) as one:
        yield one


def in_a_fork(work: Any) -> str:
    """What ``work`` returns in a fork of this process; the class of what it raises."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = str(work())
        except BaseException as error:
            answer = type(error).__name__
        os.write(writing, answer.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answers:
        answer = answers.read()
    os.waitpid(child, 0)
    return answer


def test_a_fork_has_no_session_and_ends_none(daemon: Running, cache: KvCache) -> None:
    """Two processes would write one session's pages, and the first to end would give them to others."""
    [grant] = cache.step([Demand.of_prompt("a", [1, 2, 3], 2)])
    assert in_a_fork(cache.may_write) == "False"
    assert in_a_fork(lambda: cache.pages) == "SessionExpired"
    assert in_a_fork(lambda: cache.step([], removed=["a"])) == "SessionExpired"
    assert in_a_fork(cache.reopen) == "SessionExpired"
    assert in_a_fork(cache.close) == "None"
    assert in_a_fork(lambda: cache.__exit__(None, None, None)) == "None"
    assert cache.may_write()
    [more] = cache.step([Demand.of_step("a", 0, [1, 2, 3], 3, 2)])
    assert more.error is None and len({*grant.pages, *more.pages}) == 3
    pool = daemon.stub.GetStats(pb.GetStatsRequest()).pools[0]
    assert (pool.sessions, pool.held_pages) == (1, 3)


def test_more_sequences_than_a_message_takes_go_in_several(daemon: Running, cache: KvCache) -> None:
    count = STEP_SEQUENCES + 1
    names = [f"s{number}" for number in range(count)]
    grants = cache.step([Demand.of_prompt(name, [1], 0) for name in names])
    assert [grant.sequence_id for grant in grants] == names and not any(grant.error for grant in grants)
    steps = cache.step([Demand.of_step(name, 0, [], 0, 0) for name in names])
    assert [grant.sequence_id for grant in steps] == names and not any(grant.error for grant in steps)
    last = [Demand.of_prompt("last", [1, 2, 3], 8)]
    [grant] = cache.step(last, removed=names)
    assert len(grant.pages) == 8
    assert daemon.stub.GetStats(pb.GetStatsRequest()).pools[0].active_sequences == 1


def test_an_id_is_no_list_of_ids(cache: KvCache) -> None:
    cache.step([Demand.of_prompt("ab", [1], 1)])
    with pytest.raises(TypeError, match="removed is 'ab': it must be a list of ids"):
        cache.step([], removed="ab")


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("ttl_s", math.nan, "ttl_s is nan; it must be 1 to 600"),
        ("ttl_s", math.inf, "ttl_s is inf; it must be 1 to 600"),
        ("ttl_s", 1e300, "ttl_s is 1e\\+300; it must be 1 to 600"),
        ("pool_pages", -1, "pool_pages is -1; it must be 0 to 4294967295"),
        ("pool_pages", 2**32, "pool_pages is 4294967296; it must be 0 to 4294967295"),
        ("max_pages", -1, "max_pages is -1; it must be 0 to 4294967295"),
    ],
)
def test_numbers_out_of_range_are_named(option: str, value: float, says: str) -> None:
    options: Any = {option: value}
    with pytest.raises(InvalidConfiguration, match=f"^{says}$") as caught:
        KvCache("unix:/run/k.sock", "pool", LAYOUT, **options)
    assert caught.value.field == option


def test_a_relative_socket_is_looked_at_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    anybody = tmp_path / "anybody"
    anybody.mkdir()
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("anybody/k.sock")
        anybody.chmod(0o777)
        with pytest.raises(InvalidConfiguration, match="other users could replace what is in it"):
            KvCache("unix:anybody/k.sock", "pool", LAYOUT).reopen()


@pytest.mark.parametrize("target", ["", "127.0.0.1:65536", "[::1]:99999"])
def test_addresses_that_lead_elsewhere_are_refused(target: str) -> None:
    """gRPC takes a port modulo 65536, and calls whoever is there."""
    with pytest.raises(InvalidConfiguration, match="HOST:PORT with a port of 1 to 65535"):
        KvCache(target, "pool", LAYOUT).reopen()


@pytest.mark.parametrize(
    "demand",
    [
        Demand.of_prompt("bad", [-1], 1),
        Demand.of_prompt("bad", [1], 2**40),
        Demand.of_prompt("bad", [1], 1, salt="\ud800"),
        Demand.of_prompt("bad", [1], 1, retention=Retention(math.inf, 1)),
        Demand.of_step("bad", 0, [2**32], 1, 0),
        Demand.of_step("bad", -1, [1], 1, 0),
    ],
)
def test_a_value_that_no_message_carries_is_named_with_its_sequence(cache: KvCache, demand: Demand) -> None:
    good = Demand.of_step("good", 0, [], 1, 0)
    with pytest.raises(ValueError, match=r"^sequence 'bad': "):
        cache.step([good, demand])
    [grant] = cache.step([Demand.of_prompt("next", [1], 1)])
    assert grant.error is None


def test_a_step_of_a_session_that_was_ended_grants_nothing(cache: KvCache) -> None:
    """Its pages would go into block tables of the session that follows, whose pages they are not."""
    step = cache.start_step([Demand.of_prompt("a", [1], 1)])
    cache.reopen()
    with pytest.raises(SessionExpired, match="the session of this step has ended"):
        step.result()
    assert cache.may_write(), "the new session is another"
    last = cache.start_step([Demand.of_prompt("b", [1], 1)])
    cache.close()
    with pytest.raises(SessionExpired):
        last.result()


def test_an_abstract_socket_is_trusted_to_nobody() -> None:
    with pytest.raises(InvalidConfiguration, match="unix-abstract:kvcache: an abstract socket may be anybody's"):
        KvCache("unix-abstract:kvcache", "pool", LAYOUT).reopen()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_lease_is_kept_again_after_an_observer_of_calls_failed(daemon: Running) -> None:
    """What ends the thread that renews does not end every session to come."""
    clock, calls = Clock(), list[float]()
    lease = Lease(1, 3.0, clock())

    def renew(lease: Lease) -> None:
        calls.append(clock())
        lease.renewed_at = clock()
        raise KeyError("of an observer")

    keeper = LeaseKeeper(lambda: lease, renew, clock)
    clock.now += 2
    keeper.start()
    assert keeper._thread is not None
    keeper._thread.join(30)
    clock.now += 2
    keeper.start()
    keeper._thread.join(30)
    keeper.close()
    assert len(calls) == 2


def test_without_a_session_a_fork_is_told_the_same(daemon: Running) -> None:
    cache = KvCache(str(daemon.config.listeners[0]), "pool", LAYOUT)
    with pytest.raises(SessionExpired):
        cache.step([])
    assert in_a_fork(lambda: cache.step([])) == "SessionExpired"
    cache.close()

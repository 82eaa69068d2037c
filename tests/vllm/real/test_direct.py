"""The daemon's pages as the real vLLM's blocks.

As in `test_vllm`, few engines are started and each serves several tests, which run in the order of this file.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from rocmforge.kvcache.v1 import kvcache_pb2
from tests.vllm.real.scripts import command, importing_tests
from tests.vllm.real.stage import HITS, PLAIN_BLOCKS, Stage, prompts, staged

pytestmark = pytest.mark.timeout(900)
#: Of 32 tokens: so few that requests are preempted.
PAGES = 64


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    extra, options = {"direct": True, "pool_pages": PAGES}, {"num_gpu_blocks_override": PLAIN_BLOCKS}
    with staged(tmp_path_factory.mktemp("direct"), extra, options, alone=True) as made:
        for name in ("one", "two", "plain"):  # side by side, since a start takes long
            made.start(name)
        yield made


def test_other_seams_are_refused() -> None:
    done = subprocess.run(
        command("seams"),
        env=importing_tests(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "BlockPool.get_new_blocks of this vLLM takes ['self', 'num_blocks', 'hint']" in done.stdout
    assert "manages this KV cache with a HybridKVCacheCoordinator" in done.stdout


def test_tokens_are_those_of_vllm_on_its_own_blocks(stage: Stage) -> None:
    one, right = stage.peer("one"), stage.right(1, 64, 40)
    [pool] = stage.stats().pools
    assert pool.total_pages == PAGES and not pool.granted_pages
    assert one.generate(prompts(1, 64), 40) == right
    assert one.metric("vllm:num_preemptions_total") > 0
    before = one.metric(HITS)
    cancels = [nth % 30 if nth % 4 == 0 else None for nth in range(64)]
    for said, whole, cancel in zip(one.generate(prompts(1, 64), 40, cancel_after=cancels), right, cancels, strict=True):
        assert said == whole[: len(said)] and len(said) >= (cancel or 0)
    assert one.metric(HITS) > before
    assert not one.metric("vllm:rocmforge_save_bytes_total") + one.metric("vllm:rocmforge_load_bytes_total")
    stage.check_clean()


def show(what: str, **values: object) -> None:
    """Print a line of what is seen, for whoever runs this with ``-s``."""
    print(json.dumps({"what": what, **values}), flush=True)


def counts(pool: kvcache_pb2.PoolStats) -> dict[str, int]:
    """How many pages are in which state."""
    names = (
        "total_pages",
        "free_pages",
        "held_pages",
        "cached_pages",
        "quarantined_pages",
        "sessions",
        "corrupted_pages",
    )
    return {name.removesuffix("_pages"): getattr(pool, name) for name in names}


def mapped(pid: int, name: str) -> dict[str, int]:
    """Of the mappings of a process whose file's name contains that, the sums in KiB; and their inodes."""
    found: dict[str, int] = {"Rss": 0, "Shared": 0, "Private_Dirty": 0}
    inside = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-", line):
            inside = name in line
            if inside:
                found["inode"] = int(line.split()[4])
        elif inside:
            kind, value = line.split(":")
            kind = "Shared" if kind.startswith("Shared_") and "Huge" not in kind else kind
            if kind in found:
                found[kind] += int(value.split()[0])
    return found


def test_two_engines_hold_one_copy_of_a_prefix(stage: Stage) -> None:
    prefix = [nth * 7 % 1000 + 1 for nth in range(8 * 32)]
    asked = [[*prefix, 5, nth] for nth in (1, 2)]
    one, two, plain = stage.peer("one"), stage.peer("two"), stage.peer("plain")
    one.generate([[*prefix, 3]], 1)
    under_way = [peer.ask(prompts=[prompt], max_tokens=220) for peer, prompt in zip((one, two), asked, strict=True)]
    until = time.monotonic() + 60
    tables: list[list[int]] = []
    while len(tables) < 2 or any(len(table) < 9 for table in tables):
        tables, listed = [], stage.stub.ListSequences(kvcache_pb2.ListSequencesRequest()).sequences
        for each in listed:
            request = kvcache_pb2.GetSequenceRequest(session_handle=each.session_handle, sequence_id=each.sequence_id)
            with contextlib.suppress(grpc.RpcError):  # it has ended since
                tables.append(list(stage.stub.GetSequence(request).sequence.page_ids))
        assert time.monotonic() < until, one.log() + two.log()
    stats = stage.stats()
    [pool] = stats.pools
    assert tables[0][:8] == tables[1][:8] and set(tables[0][8:]).isdisjoint(tables[1][8:])
    assert pool.held_pages < 2 * 8 + 2
    show("one prefix of 8 pages, two requests", tables=tables, pool=counts(pool))
    maps = [mapped(session.pid, str(stage.directory)) for session in stats.sessions]
    assert len(maps) == 2 and maps[0]["inode"] == maps[1]["inode"], maps
    show("the arena in each process, KiB", one=maps[0], two=maps[1])
    whole = PAGES * pool.page_bytes // 1024 + 8
    assert all(0 < each["Shared"] <= 2 * whole for each in maps), maps
    said = [peer.answer(number)["tokens"] for peer, number in zip((one, two), under_way, strict=True)]
    assert said == [[tokens] for tokens in plain.generate(asked, 220)]
    stage.check_clean()


def test_two_engines_fill_a_pool(stage: Stage) -> None:
    one, two, right = stage.peer("one"), stage.peer("two"), stage.right(1, 64, 40)
    before = two.metric(HITS)
    under_way = [peer.ask(prompts=prompts(1, 64), max_tokens=40) for peer in (one, two)]
    assert [peer.answer(number)["tokens"] for peer, number in zip((one, two), under_way, strict=True)] == [right, right]
    assert two.metric(HITS) > before
    stage.check_clean()


def test_vllm_is_killed_and_another_goes_on_with_its_pages(stage: Stage) -> None:
    one, two, right = stage.peer("one"), stage.peer("two"), stage.right(3, 16, 60)
    saved = one.metric("vllm:rocmforge_saved_tokens_total")
    one.ask(prompts=prompts(3, 16), max_tokens=60)
    under_way = two.ask(prompts=prompts(1, 64), max_tokens=40)
    until = time.monotonic() + 100
    while one.metric("vllm:rocmforge_saved_tokens_total") < saved + 500:
        assert time.monotonic() < until, one.log()
    show("both run", pool=counts(stage.stats().pools[0]))
    one.kill()
    del stage.peers["one"]
    show("one was killed", pool=counts(stage.stats().pools[0]))
    assert two.answer(under_way)["tokens"] == stage.right(1, 64, 40)
    stage.check_clean()
    before = two.metric(HITS)
    assert two.generate(prompts(3, 16), 60) == right
    stage.check_clean()
    show("two answered its own prompts and those of one", same=True, cached=two.metric(HITS) - before)
    show("nothing runs", pool=counts(stage.stats().pools[0]))


def test_the_daemon_is_killed_and_comes_back(stage: Stage) -> None:
    two, right = stage.peer("two"), stage.right(4, 16, 60)
    saved = two.metric("vllm:rocmforge_saved_tokens_total")
    under_way = two.ask(prompts=prompts(4, 16), max_tokens=60)
    until = time.monotonic() + 100
    while two.metric("vllm:rocmforge_saved_tokens_total") < saved + 300:
        assert time.monotonic() < until, two.log()
    stage.daemon.kill()
    show("the daemon was killed")
    stage.restart_daemon()
    assert two.answer(under_way)["tokens"] == right
    assert two.metric("vllm:rocmforge_lost_sessions_total") == 1
    show("two answered the same", same=True, pool=counts(stage.stats().pools[0]))
    before = two.metric(HITS)
    assert two.generate(prompts(4, 16), 60) == right
    assert two.metric(HITS) > before
    stage.check_clean()

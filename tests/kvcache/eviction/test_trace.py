"""Whole traces through the state object: the benchmark's accounting, and what the learned policy is for.

The traffic is made here. The shapes are plain on purpose: which policy should win, and by about how much, can be said
beforehand.
"""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest

from benchmarks import eviction
from benchmarks.eviction import Trace, belady, hits, measure, read_trace, replay, unbounded

PAGES = 300


class Traffic:
    """Makes requests, each the blocks of one conversation so far."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._ids = itertools.count(1)

    def conversation(self) -> list[int]:
        return self.blocks(self.random.randint(4, 20))

    def blocks(self, count: int) -> list[int]:
        return [next(self._ids) for _ in range(count)]

    def scan(self, requests: int) -> Trace:
        """Nothing ever comes back."""
        return [self.conversation() for _ in range(requests)]

    def hot_and_scan(self, requests: int) -> Trace:
        """A third of the requests are for 20 documents, most of a pool; the others are a scan."""
        documents = [self.conversation() for _ in range(20)]
        return [
            self.random.choice(documents) if self.random.random() < 1 / 3 else self.conversation()
            for _ in range(requests)
        ]

    def recent(self, requests: int, depth: float) -> Trace:
        """Conversations that grow; the more recently one was used, the likelier it continues."""
        trace: Trace = []
        stack: list[list[int]] = []
        for _ in range(requests):
            back = int(self.random.expovariate(1 / depth))
            if back >= len(stack) or self.random.random() < 0.2:
                stack.append(self.conversation())
            else:
                stack.append(stack.pop(-1 - back) + self.blocks(self.random.randint(0, 2)))
            trace.append(stack[-1])
        return trace

    def loop(self, requests: int, documents: int) -> Trace:
        """The same documents over and over, in order."""
        return list(itertools.islice(itertools.cycle([self.conversation() for _ in range(documents)]), requests))


def least_recent(trace: Trace, pages: int) -> int:
    """Hits of a list that is searched and rearranged: least recently used, made another way."""
    cached: list[int] = []
    hits = 0
    for request in trace:
        blocks = request[:pages]
        matched = len(list(itertools.takewhile(cached.__contains__, blocks)))
        hits += matched
        cached = [block for block in cached if block not in blocks[:matched]]
        del cached[: max(0, len(cached) + len(blocks) - pages)]
        cached += reversed(blocks)
    return hits


# --- the accounting ---


def test_lru_is_least_recently_used() -> None:
    traffic = Traffic(1)
    trace = traffic.recent(300, 8) + traffic.hot_and_scan(200)
    for pages in (20, 100, 300, 10000):
        assert replay(trace, pages, "lru") == least_recent(trace, pages)


def test_both_policies_lie_between_nothing_and_the_bounds() -> None:
    trace = Traffic(2).recent(500, 20)
    for pages in (50, 200, 1000):
        assert 0 < replay(trace, pages, "lru") <= belady(trace, pages, "") <= unbounded(trace, pages, "")
        assert 0 < replay(trace, pages, "density") <= belady(trace, pages, "")
    all_of_it = sum(map(len, trace))
    hits = {policy(trace, all_of_it, name) for policy, name in ((replay, "lru"), (replay, "density"), (belady, ""))}
    assert hits == {unbounded(trace, all_of_it, "")}


def test_belady_gives_up_what_is_used_last() -> None:
    # Two blocks, three contents: keeping 1 over 2 is right, and so is 2 over 3, which never comes back.
    trace = [[1], [2], [3], [1], [1], [2]]
    assert (belady(trace, 2, ""), replay(trace, 2, "lru")) == (2, 1)
    assert belady(trace, 3, "") == 3


def test_a_request_larger_than_the_pool_is_cut_and_the_rest_are_misses() -> None:
    trace = [[1, 2, 3, 4, 5]] * 3
    assert [replay(trace, 3, "lru"), replay(trace, 3, "density"), belady(trace, 3, "")] == [6, 6, 6]
    [row] = measure(trace, [3], ["lru"])
    assert row.hit_rate == 6 / 15


def test_any_ids_will_do() -> None:
    trace = [[-1, 2**70], [-1, 2**70, 5], []]
    assert replay(trace, 10, "density") == 2


# --- what the policies are for ---


def test_a_scan_does_not_flush_what_comes_back() -> None:
    trace = Traffic(3).hot_and_scan(1500)
    assert replay(trace, PAGES, "density") > 1.3 * replay(trace, PAGES, "lru")


def test_a_loop_over_more_than_fits_keeps_a_part() -> None:
    trace = Traffic(4).loop(750, 50)  # twice the pool
    assert replay(trace, PAGES, "lru") == 0
    assert replay(trace, PAGES, "density") > 0.5 * belady(trace, PAGES, "")


@pytest.mark.parametrize("depth", [10, 25, 60])
def test_where_recency_is_right_next_to_nothing_is_lost(depth: float) -> None:
    trace, pages = Traffic(5).recent(3000, depth), 2 * PAGES
    assert replay(trace, pages, "density") >= 0.98 * replay(trace, pages, "lru")


def test_after_a_change_of_traffic_it_learns_again() -> None:
    traffic = Traffic(6)
    start = traffic.hot_and_scan(750) + traffic.loop(300, 50) + traffic.recent(750, 12)
    trace = start + traffic.recent(750, 12)
    learned, recent = (sum(list(hits(trace, PAGES, policy))[len(start) :]) for policy in ("density", "lru"))
    assert learned >= 0.97 * recent


def test_a_replay_can_be_repeated() -> None:
    trace = Traffic(7).hot_and_scan(500)
    assert replay(trace, 100, "density") == replay(trace, 100, "density")


# --- the command ---


def test_the_command_prints_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "hash_ids": [0, 1]}\n\n{"timestamp": 1, "hash_ids": [0, 1, 2]}\n')
    arguments = ["--trace", str(path), "--pages", "2,10", "--policy", "lru,density,belady,unbounded"]
    assert eviction.main([*arguments, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["policy"], row["pages"], row["hit_rate"]) for row in rows] == [
        (policy, pages, 2 / 5) for policy in ("lru", "density", "belady", "unbounded") for pages in (2, 10)
    ]
    assert eviction.main(arguments) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["2", *["0.4000"] * 4]


@pytest.mark.parametrize("line", ["[]", "{}", "{", '{"hash_ids": 3}', '{"hash_ids": ["a"]}'])
def test_a_line_that_is_no_request_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f'{{"hash_ids": [0]}}\n{line}\n')
    with pytest.raises(ValueError, match=r"trace\.jsonl:2: "):
        read_trace(path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pages", "0"], "--pages 0: expected at least 1"),
        (["--pages", "many"], "--pages many: expected integers"),
        (["--policy", "fifo"], "--policy fifo: expected some of lru, density, hinted, belady, unbounded"),
        ([], "No such file"),
    ],
)
def test_a_bad_flag_is_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        eviction.main(["--trace", "/proc/none", *arguments])
    assert message in capsys.readouterr().err

"""The connector in the real vLLM, on a real daemon. Starting a vLLM takes longest, so few are started and each serves
several tests, which run in the order of this file.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.vllm.real.stage import HITS, Stage, prompts, staged

pytestmark = pytest.mark.timeout(900)
#: So few blocks that requests are preempted.
BLOCKS = 56


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    options = {
        "num_gpu_blocks_override": BLOCKS,
        "kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"},
    }
    with staged(tmp_path_factory.mktemp("vllm"), {}, options) as made:
        yield made


def test_tokens_are_those_of_vllm_without_it(stage: Stage) -> None:
    one, right = stage.peer("one"), stage.right(1, 64, 40)
    assert one.generate(prompts(1, 64), 40) == right
    assert one.metric("vllm:num_preemptions_total") > 0
    one.forget()
    before = one.metric(HITS)
    cancels = [nth % 30 if nth % 4 == 0 else None for nth in range(64)]
    for said, whole, cancel in zip(one.generate(prompts(1, 64), 40, cancel_after=cancels), right, cancels, strict=True):
        assert said == whole[: len(said)] and len(said) >= (cancel or 0)
    assert one.metric(HITS) > before
    stage.check_clean()


def test_a_second_engine_takes_the_prefixes_of_the_first(stage: Stage) -> None:
    two = stage.peer("two")
    assert two.generate(prompts(1, 64), 40) == stage.right(1, 64, 40)
    assert two.metric(HITS) >= 64 * 32
    # vLLM counts the hits of requests that were preempted elsewhere.
    assert two.metric("vllm:rocmforge_loaded_tokens_total") >= two.metric(HITS)
    assert two.metric("vllm:rocmforge_connected") == 1
    before = two.metric(HITS)
    two.generate(prompts(1, 16), 4, salt="another tenant")
    assert two.metric(HITS) == before
    two.forget(external=True)
    assert two.generate(prompts(1, 16), 4) == [said[:4] for said in stage.right(1, 64, 40)[:16]]
    assert two.metric(HITS) == before
    stage.check_clean()


def test_vllm_is_killed_and_the_next_start_is_warm(stage: Stage) -> None:
    one, right = stage.peer("one"), stage.right(3, 16, 60)
    saved = one.metric("vllm:rocmforge_saved_tokens_total")
    one.ask(prompts=prompts(3, 16), max_tokens=60)
    until = time.monotonic() + 60
    while one.metric("vllm:rocmforge_saved_tokens_total") < saved + 1000:
        assert time.monotonic() < until, one.log()
    one.kill()
    del stage.peers["one"]
    stage.check_clean()
    again = stage.peer("again")
    assert again.generate(prompts(3, 16), 60) == right
    assert again.metric(HITS) > 500
    stage.check_clean()


def test_the_daemon_is_killed_and_comes_back(stage: Stage) -> None:
    again, right = stage.peer("again"), stage.right(4, 16, 60)
    again.forget()
    under_way = again.ask(prompts=prompts(4, 16), max_tokens=60)
    saved = again.metric("vllm:rocmforge_saved_tokens_total")
    until = time.monotonic() + 60
    while again.metric("vllm:rocmforge_saved_tokens_total") < saved + 300:
        assert time.monotonic() < until, again.log()
    stage.daemon.kill()
    assert again.answer(under_way)["tokens"] == right
    again.forget()
    assert again.generate(prompts(4, 16), 60) == right  # without a daemon
    stage.restart_daemon()
    while again.metric("vllm:rocmforge_connected") != 1:
        assert time.monotonic() < until + 300, again.log()
        again.generate([[1, 2, 3]], 2)
    again.generate(prompts(4, 16), 60)
    again.forget()
    before = again.metric(HITS)
    assert again.generate(prompts(4, 16), 60) == right
    assert again.metric(HITS) > before
    stage.check_clean()

"""vLLM's own scheduler and block pool around the connector, with the arithmetic model of tests/vllm/doubles.py in place
of a worker's: run by vLLM's Python, without starting an engine.

Prints a line of JSON: how many answers were wrong, and what the connector moved.
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import msgspec
import torch
from vllm import EngineArgs, SamplingParams
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import BlockStored, KVEventBatch
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from rocmforge.client import KvCache, PageLayout
from rocmforge.vllm.connector import PlanMetadata, ReportMetadata
from rocmforge.vllm.worker import WorkerHalf
from tests.vllm import doubles

SIZE = 32
#: Far more than the requests need, most of which wait for the daemon.
MOST_STEPS = 20_000


class Published:
    """What vLLM's scheduler publishes, as a subscriber reads it: decoded by vLLM's own classes, block by block."""

    def __init__(self) -> None:
        self.blocks: dict[str | None, dict[Any, Any]] = {}

    def publish(self, batch: Any) -> None:
        """Take a batch, as it would be on the wire."""
        read = msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=KVEventBatch)
        for event in read.events:
            if isinstance(event, BlockStored):
                size, parent = event.block_size, event.parent_block_hash
                keys = event.extra_keys or [None] * len(event.block_hashes)
                for nth, (block, key) in enumerate(zip(event.block_hashes, keys, strict=True)):
                    told = (parent, tuple(event.token_ids[nth * size : (nth + 1) * size]), tuple(key or ()))
                    self.blocks.setdefault(event.medium, {})[block] = told
                    parent = block

    def told(self) -> dict[str, int]:
        """How many blocks the connector published, how many of them salted, and of how many vLLM says otherwise."""
        ours = self.blocks.get("CPU", {})
        own = {
            block: told for medium, blocks in self.blocks.items() if medium != "CPU" for block, told in blocks.items()
        }
        return {
            "events": len(ours),
            "salted_events": sum(key == ("tenant",) for _, _, key in ours.values()),
            "other_events": sum(own.get(block) != told for block, told in ours.items()),
        }


class Computed:
    """The model: it computes what vLLM's scheduler says, from the blocks that it says."""

    def __init__(self, cache: doubles.Cache) -> None:
        self.cache = cache
        self.tables: dict[str, list[int]] = {}
        self.tokens: dict[str, list[int]] = {}

    def run(self, output: Any, requests: dict[str, Request]) -> dict[str, int]:
        """The tokens that a step samples: of each request whose last known token, or one behind it, was computed."""
        for new in output.scheduled_new_reqs:
            self.tables[new.req_id] = list(new.block_ids[0])
            self.tokens.setdefault(new.req_id, list(requests[new.req_id].all_token_ids))
        cached = output.scheduled_cached_reqs
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        for nth, name in enumerate(cached.req_ids):
            if name in cached.resumed_req_ids:
                self.tables[name] = list(cached.new_block_ids[nth][0])
            elif cached.new_block_ids[nth]:
                self.tables[name] += cached.new_block_ids[nth][0]
            starts[name] = cached.num_computed_tokens[nth]
        sampled = {}
        for name, count in output.num_scheduled_tokens.items():
            blocks = [doubles.Block(number) for number in self.tables[name]]
            tokens, stop = self.tokens[name], starts[name] + count
            for at in range(starts[name], stop):
                before = self.cache.read(blocks, at - 1) if at else 0
                self.cache.write(blocks, at, doubles.chained(before, tokens[at]))
            if stop >= requests[name].num_tokens:
                sampled[name] = sum(self.cache.read(blocks, at) for at in range(stop)) % doubles.VOCABULARY
                tokens[stop:] = [sampled[name]]
        return sampled


def main(model: str, daemon: str, ahead: bool, page_size: int, blocks: int) -> None:
    """Two rounds of requests, vLLM's own cache forgotten between them."""
    transfer = {
        "kv_connector": "RocmForgeConnector",
        "kv_connector_module_path": "rocmforge.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"daemon": daemon, "page_size": page_size, "lookup_timeout_s": 20},
    }
    config = EngineArgs(
        model=model, dtype="float32", max_model_len=512, max_num_seqs=6, max_num_batched_tokens=96, block_size=SIZE,
        enforce_eager=True, kv_transfer_config=transfer, async_scheduling=ahead, skip_tokenizer_init=True,
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
    ).create_engine_config()  # fmt: skip
    config.cache_config.num_gpu_blocks = blocks
    spec = FullAttentionSpec(block_size=SIZE, num_kv_heads=doubles.HEADS, head_size=doubles.DIM, dtype=torch.float32)
    names = [f"layer.{nth}" for nth in range(doubles.LAYERS)]
    whole = KVCacheConfig(blocks, tensors(names, spec, blocks), [KVCacheGroupSpec(names, spec)])
    kind = AsyncScheduler if ahead else Scheduler
    scheduler = kind(config, whole, StructuredOutputManager(config), block_size=SIZE, log_stats=True)
    published = scheduler.kv_event_publisher = Published()
    layout = PageLayout(page_size, doubles.LAYERS, doubles.HEADS, doubles.DIM, "f32")
    cache = doubles.Cache(blocks, SIZE, page_size)
    worker = WorkerHalf(KvCache(daemon, f"scheduled-{page_size}", layout, pool_pages=1024), cache, page_size=page_size)
    worker.start()
    model_ = Computed(cache)
    init_none_hash(sha256)
    hasher = get_request_block_hasher(SIZE, sha256)
    draw = random.Random(page_size + ahead)
    roots = [[draw.randrange(doubles.VOCABULARY) for _ in range(length)] for length in (0, 70, 200)]
    jobs = [
        draw.choice(roots) + [draw.randrange(doubles.VOCABULARY) for _ in range(draw.randint(5, 60))] for _ in range(24)
    ]
    wrong, preempted = 0, 0
    for round_ in range(2):
        prompts = {f"{round_}.{nth}": prompt for nth, prompt in enumerate(jobs)}
        requests = {}
        for name, prompt in prompts.items():
            params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
            params.update_from_generation_config({}, 0)
            salt = "tenant" if name.endswith(("1", "4", "7")) else None
            requests[name] = Request(name, list(prompt), params, None, block_hasher=hasher, cache_salt=salt)
            scheduler.add_request(requests[name])
        waiting: list[tuple[Any, ModelRunnerOutput]] = []
        steps = 0
        while scheduler.has_requests() or waiting:
            steps += 1
            if steps == 30:
                scheduler.finish_requests([f"{round_}.3", f"{round_}.9"], RequestStatus.FINISHED_ABORTED)
            if steps > MOST_STEPS:
                raise TimeoutError("the scheduler does not come to an end")
            output = scheduler.schedule()
            metadata = output.kv_connector_metadata
            if not isinstance(metadata, PlanMetadata):
                raise TypeError(metadata)
            worker.submit(metadata.plan, saves=False)
            sampled = model_.run(output, requests)
            worker.submit(metadata.plan, saves=True)
            if metadata.plan.idle:
                worker.wait(0.01)
            report = worker.collect()
            said = KVConnectorOutput(
                finished_recving=report.loaded or None,
                invalid_block_ids=report.unloaded,
                kv_connector_worker_meta=ReportMetadata(report),
            )
            ran = list(output.num_scheduled_tokens)
            waiting.append(
                (
                    output,
                    ModelRunnerOutput(
                        req_ids=ran,
                        req_id_to_index={name: nth for nth, name in enumerate(ran)},
                        sampled_token_ids=[[sampled[name]] if name in sampled else [] for name in ran],
                        logprobs=None,
                        prompt_logprobs_dict={},
                        pooler_output=[],
                        kv_connector_output=said,
                    ),
                )
            )
            while len(waiting) > int(ahead) or (waiting and not ran):
                scheduler.update_from_output(*waiting.pop(0))
        for name, request in requests.items():
            right = doubles.answer(prompts[name], 20)[: len(request.output_token_ids)]
            wrong += list(request.output_token_ids) != right
            preempted += request.num_preemptions
        if not scheduler.reset_prefix_cache():
            raise RuntimeError("blocks are still held")
    counts = worker.take_counts()
    worker.close()
    print(json.dumps({"wrong": wrong, "preempted": preempted, **published.told(), **counts}))


def tensors(names: list[str], spec: Any, blocks: int) -> list[Any]:
    """The layers' placement as the scheduler gets it, which it does not read; versions differ."""
    size = spec.page_size_bytes * blocks
    try:
        return [KVCacheTensor(size=size, shared_by=[name]) for name in names]
    except TypeError:
        return [
            KVCacheTensor(size=size * len(names), layers=names, layer_stride=size, block_stride=spec.page_size_bytes)
        ]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3] == "ahead", int(sys.argv[4]), int(sys.argv[5]))

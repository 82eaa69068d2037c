"""Valid inputs for each target, to begin with: ``python -m tests.fuzz.seeds`` writes them into the corpus."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import tokenizers
from google.protobuf.message import Message

from rocmforge.engine.v1 import engine_pb2
from rocmforge.kvcache.v1 import kvcache_pb2 as pb
from tests.generation import request
from tests.kvcache.clients.messages import fork, opening, report, step
from tests.models.checkpoints import llama_config, random_tensors, write_checkpoint
from tests.models.gguf_files import write_gguf

CORPUS = Path(__file__).with_name("corpus")
VOCAB = 64
SHAPE = llama_config(hidden=8, layers=1, query_heads=2, kv_heads=1, head_dim=4, intermediate=8, vocab=VOCAB, context=64)
CONFIG = json.dumps(SHAPE).encode()
#: The first session of a World (tests/kvcache/fakes.py), which is attached when a kvcache input begins.
SESSION = f"{7:016x}-{(1).to_bytes(16, 'little').hex()}"
TIME = 255


def record(number: int, payload: bytes) -> bytes:
    """One message in an input of a servicer: the number of its method, its length, and its bytes."""
    return bytes([number]) + len(payload).to_bytes(2, "big") + payload


def records(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The messages of an input; the last may be shorter than it says."""
    at = 0
    while at + 3 <= len(data):
        length = int.from_bytes(data[at + 1 : at + 3], "big")
        yield data[at], data[at + 3 : at + 3 + length]
        at += 3 + length


def methods(module: Any, service: str) -> list[str]:
    """The methods of a service in the order of the proto: their numbers in inputs."""
    return [method.name for method in module.DESCRIPTOR.services_by_name[service].methods]


def calls(module: Any, service: str, *messages: Message) -> bytes:
    """An input of these requests."""
    names = methods(module, service)
    told = b""
    for message in messages:
        name = message.DESCRIPTOR.name.removesuffix("Request")
        told += record(names.index(name), message.SerializeToString())
    return told


def tokenizer_json() -> bytes:
    """A byte-level tokenizer of few tokens."""
    letters = {chr(code): at for at, code in enumerate((*range(97, 123), 32, 44, 288))}
    model = tokenizers.models.BPE(vocab={**letters, "to": 30, "be": 31}, merges=[("t", "o"), ("b", "e")])
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens([tokenizers.AddedToken("<|end|>", special=True)])
    return inner.to_str().encode()


def _kvcache() -> dict[str, bytes]:
    def allocate(*demands: pb.Demand, removed: tuple[str, ...] = ()) -> pb.AllocatePagesRequest:
        return pb.AllocatePagesRequest(session_id=SESSION, demands=demands, remove_sequence_ids=removed)

    layout = pb.PageLayout(page_size=4, layers=1, kv_heads=1, head_dim=4, data_type=pb.DATA_TYPE_F32)
    prompt = list(range(9))
    session = pb.OpenSessionRequest(client_name="c", pool_id="pool", layout=layout, pool_pages=8, max_pages=4)
    session.ttl.FromSeconds(3)
    session.process.pid, session.process.start_time, session.process.pid_namespace = 7, 1, "here"
    kept = opening("r", prompt, 3)
    kept.opening.prompt.retention.ttl.FromSeconds(9)
    kept.opening.prompt.retention.priority = 5
    expire = pb.ExpireSequencesRequest()
    expire.older_than.FromSeconds(0)
    life = [
        allocate(opening("a", prompt, 3)),
        allocate(step("a", 0, prompt, 4, 3), fork("b", "a", 4)),
        pb.AppendTokensRequest(session_id=SESSION, steps=report("a", 9, [9, 10, 11])),
        allocate(step("a", 12, [12], 5, 4), step("b", 9, [7], 4, 3), opening("c", [*prompt, 9], 3)),
        pb.GetSequenceRequest(session_id=SESSION, sequence_id="a", include_tokens=True),
        pb.ListSequencesRequest(session_id=SESSION, limit=1),
        pb.RemoveSequencesRequest(session_id=SESSION, sequence_ids=["a", "z"]),
        pb.ExplainPrefixRequest(pool_id="pool", prompt=prompt),
        pb.GetStatsRequest(),
        pb.FsckRequest(deep=True),
        pb.WatchEventsRequest(after_sequence_number=0),
        pb.EvictPagesRequest(pool_id="pool", max_pages=1),
        pb.CloseSessionRequest(session_id=SESSION),
        pb.DropPoolRequest(pool_id="pool"),
    ]
    opaque = pb.PageLayout(page_size=4, opaque=pb.OpaquePage(label="inside", page_bytes=100))
    others = [
        session,
        pb.OpenSessionRequest(client_name="c", pool_id="opaque", layout=opaque, pool_pages=2),
        pb.AttachSessionRequest(session_id=SESSION, seen=bytes(32)),
        pb.RenewSessionRequest(session_id=SESSION),
        allocate(kept),
        allocate(removed=("r",)),
        expire,
        pb.EvictPagesRequest(pool_id="pool", include_retained=True),
    ]
    name = "KvCacheService"
    late = calls(pb, name, life[0], life[1]) + record(TIME, b"\x14") + calls(pb, name, life[3], session)
    return {"life": calls(pb, name, *life), "others": calls(pb, name, *others), "late": late}


def _engine() -> dict[str, bytes]:
    drawn = request(
        "ROMEO:",
        2,
        sampling={"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "seed": 3, "repetition_penalty": 1.1}
        | {"presence_penalty": 0.5, "frequency_penalty": -0.5, "logprobs": 2, "prompt_logprobs": 1},
        stopping={"stop": ["a"], "stop_token_ids": [5], "min_tokens": 1, "include_stop": True},
        request_id="one",
        cache_salt="s",
        n=2,
        priority=3,
    )
    drawn.sampling.logit_bias[3] = 1.5
    greedy = request([1, 2, 3], 2, request_id="two")
    talk = request("", 2)
    talk.prompt.messages.items.add(role="user", content="Hi", other='{"a": 1}')
    talk.prompt.messages.tools.append('{"name": "f"}')
    talk.prompt.messages.template_arguments["thinking"] = True
    submit = engine_pb2.SubmitGenerationRequest(request=greedy)
    submit.timeout.FromSeconds(9)
    submit.retention.FromSeconds(9)
    purge = engine_pb2.PurgeGenerationsRequest()
    purge.older_than.FromSeconds(0)
    name = "EngineService"
    attached = [engine_pb2.GenerateRequest(), drawn, greedy, talk, engine_pb2.BatchGenerateRequest(requests=[greedy])]
    lasting = [
        submit,
        engine_pb2.WatchGenerationRequest(request_id="two"),
        engine_pb2.GetGenerationRequest(request_id="two"),
        engine_pb2.CancelGenerationRequest(request_id="two"),
        engine_pb2.DeleteGenerationRequest(request_id="two"),
        purge,
    ]
    texts = [
        engine_pb2.TokenizeRequest(text="To be"),
        engine_pb2.TokenizeRequest(messages=talk.prompt.messages),
        engine_pb2.DetokenizeRequest(token_ids=[1, 2, 3]),
        engine_pb2.GetModelRequest(),
        engine_pb2.GetStatsRequest(),
    ]
    return {
        "attached": calls(engine_pb2, name, *attached[1:]),
        "lasting": calls(engine_pb2, name, *lasting),
        "texts": calls(engine_pb2, name, *texts),
    }


def _readers() -> dict[str, dict[str, bytes]]:
    with tempfile.TemporaryDirectory(prefix="rf-fuzz-") as name:
        folder = Path(name)
        tensors = random_tensors(SHAPE)
        write_checkpoint(folder / "f32", SHAPE, tensors)
        write_checkpoint(folder / "bf16", SHAPE, tensors, dtype="bfloat16")
        pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "a", "b", "ab", "\u2581"]
        words = {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": pieces,
            "tokenizer.ggml.scores": [float(-at) for at in range(len(pieces))],
            "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * (len(pieces) - 259)],
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.chat_template": "{{ messages[0].content }}",
        }
        bytelevel = {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "llama-bpe",
            "tokenizer.ggml.tokens": ["a", "b", "ab", *(f"[{at}]" for at in range(VOCAB - 3))],
            "tokenizer.ggml.merges": ["a b"],
            "tokenizer.ggml.token_type": [1] * VOCAB,
        }
        wide = SHAPE | {"vocab_size": len(pieces)}
        write_gguf(folder / "sp.gguf", wide, random_tensors(wide), kind=gguf.GGMLQuantizationType.F16, metadata=words)
        write_gguf(folder / "bpe.gguf", SHAPE, tensors, metadata=bytelevel)
        generation = b'{"temperature": 0.7, "top_p": 0.9, "top_k": 20, "eos_token_id": [0, 1], "suppress_tokens": [3]}'
        template = {"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}", "eos_token": "</s>"}
        scaled = SHAPE | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "eos_token_id": [0, 1]}
        llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        llama3 |= {"original_max_position_embeddings": 32}
        configs = {
            "plain": CONFIG,
            "whole": b"\0\0".join([CONFIG, generation, json.dumps(template).encode()]),
            "linear": b"\0\0".join([json.dumps(scaled).encode(), generation]),
            "llama3": json.dumps(SHAPE | {"rope_scaling": llama3}).encode(),
        }
        return {
            "safetensors": {kind: (folder / kind / "model.safetensors").read_bytes() for kind in ("f32", "bf16")},
            "gguf": {kind: (folder / f"{kind}.gguf").read_bytes() for kind in ("sp", "bpe")},
            "config": configs,
            "tokenizer": {"bpe": tokenizer_json()},
        }


def seeds() -> dict[str, dict[str, bytes]]:
    """Inputs by target and name."""
    return {"kvcache": _kvcache(), "engine": _engine(), **_readers()}


def main() -> None:
    """Write them into the corpus; what else is there stays."""
    for target, inputs in seeds().items():
        (CORPUS / target).mkdir(parents=True, exist_ok=True)
        for name, data in inputs.items():
            (CORPUS / target / f"{name}.seed").write_bytes(data)


if __name__ == "__main__":
    main()

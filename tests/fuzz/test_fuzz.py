"""The corpus is replayed, the targets can fail, and mutations keep the form. The search itself is `make fuzz`."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from rocmforge.kvcache.v1 import kvcache_pb2
from services.engine.model.checkpoint import Checkpoint
from services.engine.text.tokenizer import Tokenizer
from services.kvcache.cache.cache import KvCache
from tests.fuzz import readers, servicers
from tests.fuzz.__main__ import MOST_BYTES, READERS, TARGETS, main, target_of
from tests.fuzz.mutation import mutated
from tests.fuzz.seeds import CORPUS, calls, methods, records, seeds
from tests.kvcache import fakes

FILES = sorted(path for path in CORPUS.rglob("*") if path.is_file())
#: Seeds that show a refusal.
REFUSED = {("kvcache", "others"), ("kvcache", "late")}


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_nothing_in_the_corpus_breaks_its_target(path: Any) -> None:
    target_of(path.parent.name)(path.read_bytes())


@pytest.mark.parametrize("target", TARGETS)
def test_seeds_are_inputs_that_are_served(target: str) -> None:
    """What is refused at once leads nowhere."""
    for name, data in seeds()[target].items():
        assert len(data) <= MOST_BYTES
        target_of(target)(data)
        refused = readers.refused if target in READERS else servicers.refused
        assert bool(refused) == ((target, name) in REFUSED), (name, refused)


def test_the_corpus_is_of_the_targets_and_has_their_seeds() -> None:
    found = {(path.parent.name, path.stem): path.read_bytes() for path in FILES if path.suffix == ".seed"}
    # What the writers of files put into them changes with their versions.
    assert found.keys() == {(target, name) for target, inputs in seeds().items() for name in inputs}
    assert sum(path.stat().st_size for path in FILES) < 1 << 19
    assert {path.parent.name for path in FILES} == set(TARGETS)


def broken(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("a bug")


@pytest.mark.parametrize(
    ("target", "owner", "name"),
    [
        ("safetensors", Checkpoint, "weights"),
        ("gguf", Checkpoint, "weights"),
        ("config", Checkpoint, "open"),
        ("tokenizer", Tokenizer, "decode"),
    ],
)
def test_an_undeclared_error_of_a_reader_is_found(
    monkeypatch: pytest.MonkeyPatch, target: str, owner: Any, name: str
) -> None:
    monkeypatch.setattr(owner, name, broken)
    with pytest.raises(ZeroDivisionError):
        target_of(target)(next(iter(seeds()[target].values())))


def test_an_undeclared_error_of_a_call_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KvCache, "evicting", broken)
    with pytest.raises(AssertionError, match="INTERNAL: internal error"):
        servicers.kvcache(calls(kvcache_pb2, "KvCacheService", kvcache_pb2.EvictPagesRequest(pool_id="pool")))


def test_a_state_that_is_not_sound_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fakes, "check", lambda cache: iter(["page 3 has two owners"]))
    with pytest.raises(AssertionError, match="page 3 has two owners"):
        servicers.kvcache(calls(kvcache_pb2, "KvCacheService", kvcache_pb2.GetStatsRequest()))


# --- mutations --------------------------------------------------------------------------------------------------------


def unchanged(data: bytes, most: int) -> bytes:
    return data[:most]


def readable_messages(data: bytes) -> bool:
    names = methods(kvcache_pb2, "KvCacheService")
    for number, payload in records(data):
        if number < len(names):
            getattr(kvcache_pb2, f"{names[number]}Request").FromString(payload)
    return True


def readable_header(data: bytes) -> bool:
    return isinstance(json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]), object)


@pytest.mark.parametrize(
    ("target", "readable"),
    [
        ("kvcache", readable_messages),
        ("safetensors", readable_header),
        ("tokenizer", lambda data: bool(json.loads(data)) or True),
    ],
)
def test_mutations_keep_the_form_and_change_the_rest(target: str, readable: Callable[[bytes], bool]) -> None:
    data = next(iter(seeds()[target].values()))
    found = {mutated(target, data, MOST_BYTES, seed, unchanged) for seed in range(300)}
    assert len(found) > 100
    assert all(readable(one) and len(one) <= MOST_BYTES for one in found)
    assert mutated(target, data, MOST_BYTES, 7, unchanged) == mutated(target, data, MOST_BYTES, 7, unchanged)


@pytest.mark.parametrize("target", TARGETS)
def test_what_has_no_form_is_changed_byte_by_byte(target: str) -> None:
    for seed in range(30):
        data = random.Random(seed).randbytes(seed)
        assert isinstance(mutated(target, data, 100, seed, unchanged), bytes)


def test_an_unknown_target_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["meteor"])
    assert refused.value.code == 2 and "no such target: meteor" in capsys.readouterr().err

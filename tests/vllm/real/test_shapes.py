"""The connector in the real vLLM with other models and other pages: SmolLM2, adapters, pages of several blocks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from benchmarks.parts.shapes import described
from services.engine.model.checkpoint import Checkpoint
from tests.models.checkpoints import write_checkpoint
from tests.models.references.smollm2 import MODEL
from tests.processes import ROOT
from tests.vllm.real.peers import Peer
from tests.vllm.real.stage import HITS, Stage, prompts, staged

pytestmark = pytest.mark.timeout(900)


def shared_by_two(stage: Stage, count: int, length: int, **more: Any) -> tuple[Peer, Peer]:
    """Two engines, the second of which takes what the first computed: both say what vLLM says without a connector."""
    for name in ("one", "two", "plain"):
        stage.start(name)
    asked = prompts(7, count)
    right = stage.peer("plain").generate(asked, length, **more)
    one, two = stage.peer("one"), stage.peer("two")
    assert one.generate(asked, length, **more) == right
    before = two.metric(HITS)
    assert two.generate(asked, length, **more) == right
    assert two.metric(HITS) - before >= count * 32
    return one, two


@pytest.mark.parametrize(("block", "page"), [(32, 96), (64, 128)])
def test_pages_of_several_blocks(tmp_path: Path, block: int, page: int) -> None:
    connected = {"num_gpu_blocks_override": 56 * 32 // block}
    with staged(tmp_path, {"page_size": page}, connected, options={"block_size": block}) as stage:
        one, _ = shared_by_two(stage, 32, 24)
        [pool] = stage.stats().pools
        assert pool.layout.page_size == page and pool.published_pages > 0
        one.forget()
        before = one.metric(HITS)
        one.generate(prompts(7, 32), 2)
        assert (one.metric(HITS) - before) % page == 0, "vLLM takes whole pages"
        stage.check_clean()


@pytest.mark.needs("smollm2")
def test_smollm2(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(MODEL)
    tensors = dict[str, np.ndarray[Any, np.dtype[np.float32]]]()
    for name, stored in checkpoint.weights().items():
        tensors[name] = np.empty(stored.shape, np.float32)
        stored.read_into(tensors[name])
    config = checkpoint.config
    written = {
        **described(config, "float32"),
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "hidden_act": "silu",
        "eos_token_id": config.eos_token_ids[0],
        "bos_token_id": config.bos_token_id,
    }
    folder = write_checkpoint(tmp_path / "smollm2", written, tensors)
    options = {"model": str(folder), "skip_tokenizer_init": True}
    with staged(tmp_path, {}, {"num_gpu_blocks_override": 96}, options=options) as stage:
        shared_by_two(stage, 8, 16)
        stage.check_clean()


def write_adapter(folder: Path, model: dict[str, Any], seed: int) -> Path:
    """An adapter of rank 4 for the queries and values of every layer, large enough to change what is said."""
    draw = np.random.default_rng(seed)
    rank, hidden = 4, model["hidden_size"]
    out = {"q_proj": model["num_attention_heads"], "v_proj": model["num_key_value_heads"]}
    tensors = dict[str, np.ndarray[Any, np.dtype[np.float32]]]()
    for layer in range(model["num_hidden_layers"]):
        for name, heads in out.items():
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{place}.lora_A.weight"] = draw.normal(0, 0.2, (rank, hidden)).astype(np.float32)
            tensors[f"{place}.lora_B.weight"] = draw.normal(0, 0.2, (heads * model["head_dim"], rank)).astype(
                np.float32
            )
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": [*out], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return folder


@pytest.fixture
def adapter(tmp_path: Path) -> Callable[[int], Path]:
    model = json.loads((ROOT / "models" / "shakespeare" / "config.json").read_text())
    return lambda seed: write_adapter(tmp_path / f"adapter-{seed}", model, seed)


def test_adapters_share_with_themselves_alone(tmp_path: Path, adapter: Callable[[int], Path]) -> None:
    first, second = str(adapter(1)), str(adapter(2))
    options = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
    with staged(tmp_path, {}, {"num_gpu_blocks_override": 256}, options=options) as stage:
        _, two = shared_by_two(stage, 16, 16, lora=first)
        base, other = (stage.peer("plain").generate(prompts(7, 16), 16, **more) for more in ({}, {"lora": second}))
        adapted = stage.peer("plain").generate(prompts(7, 16), 16, lora=first)
        assert base != adapted != other != base
        for right, more in ((base, {}), (other, {"lora": second})):
            two.forget()
            before = two.metric("vllm:rocmforge_loaded_tokens_total")
            assert two.generate(prompts(7, 16)[:1], 16, **more) == right[:1]
            assert two.metric("vllm:rocmforge_loaded_tokens_total") == before, "another's K and V"
        stage.check_clean()

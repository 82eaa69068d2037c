"""Every family from a GGUF file: the same logits as from a folder, whatever the numbers are stored as."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

from services.common.errors import ModelInvalid
from services.engine.checkpoint.config import ModelConfig
from services.engine.checkpoint.rope import Linear
from services.engine.model.batch import Row
from services.engine.model.checkpoint import Checkpoint
from services.engine.model.decoder import Model
from tests.models.checkpoints import llama_config, random_tensors, write_checkpoint
from tests.models.families import FAMILIES, PROMPT_TOKENS, SEEDS, family_tensors, prompt_of
from tests.models.gguf_files import write_gguf
from tests.models.references import plain_forward

LLAMA = FAMILIES["llama2"]
TENSORS = family_tensors(LLAMA, 0)


def logits_of(model: Model, ids: list[int]) -> NDArray[np.float32]:
    """Of the last token of a prompt."""
    g = model.geometry(len(ids))
    pages = np.full((1, g.layers, 2, g.kv_heads, len(ids), g.head_dim), np.nan, np.float32)
    return model.forward([Row(ids, 0, [0], True)], pages)[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_equals_transformers(tmp_path: Path, family: str) -> None:
    config = FAMILIES[family]
    write_gguf(tmp_path / "it.gguf", config, family_tensors(config, SEEDS[family]))
    with np.load(Path(__file__).with_name("references") / "references.npz") as references:
        expected = references[f"{family}_logits"][-1]
    assert np.abs(logits_of(Model.load(tmp_path / "it.gguf"), prompt_of(SEEDS[family])) - expected).max() <= 1e-4


@pytest.mark.parametrize("family", ["llama2", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q5_1])
def test_every_storage(tmp_path: Path, family: str, kind: Kind) -> None:
    config = FAMILIES[family]
    kept = write_gguf(tmp_path / "it.gguf", config, family_tensors(config, 1), kind=kind)
    ids = prompt_of(1)
    expected, _, _ = plain_forward.forward((config, kept), ids)
    model = Model.load(tmp_path / "it.gguf")
    assert model.config.dtype == ("f16" if kind is Kind.F16 else "bf16")
    assert np.abs(logits_of(model, ids) - expected[-1]).max() <= 1e-4 * np.abs(expected).max()


def test_the_configuration_is_that_of_the_folder(tmp_path: Path) -> None:
    for family, config in FAMILIES.items():
        tensors = family_tensors(config, 0)
        write_gguf(tmp_path / f"{family}.gguf", config, tensors, metadata={"tokenizer.ggml.eos_token_id": 2})
        folder = write_checkpoint(tmp_path / family, config | {"eos_token_id": 2}, tensors)
        found = Checkpoint.open(tmp_path / f"{family}.gguf").config
        expected = ModelConfig.from_folder(folder)
        # What a GGUF file says otherwise: llama for Mistral, divisors for Llama 3's scaling, eps as float32, and by its
        # tensors whether it is tied.
        assert found.tied_embeddings == ("lm_head.weight" not in tensors)
        for name in ModelConfig.__slots__:
            if name not in ("architecture", "rope_scaling", "rms_norm_eps", "tied_embeddings"):
                assert getattr(found, name) == getattr(expected, name), (family, name)
        assert found.rms_norm_eps == np.float32(expected.rms_norm_eps)
        assert (found.qkv_bias, found.qk_norm) == (expected.qkv_bias, expected.qk_norm)


def test_all_tokens_that_end_a_text(tmp_path: Path) -> None:
    ends = {f"tokenizer.ggml.{name}_token_id": number for name, number in (("eos", 5), ("eot", 3), ("eom", 5))}
    write_gguf(tmp_path / "it.gguf", LLAMA, TENSORS, metadata=ends)
    assert Checkpoint.open(tmp_path / "it.gguf").config.eos_token_ids == (5, 3)


def test_control_tokens_that_are_spelled_as_ends_end_a_text(tmp_path: Path) -> None:
    tokens = ["a", "<|end_of_text|>", "</s>", "<|im_start|>", "<|eom_id|>", *(f"b{n}" for n in range(123))]
    spelled = {
        "tokenizer.ggml.tokens": [*tokens, "<|endoftext|>"],
        # The third is text that only looks like one.
        "tokenizer.ggml.token_type": [1, 3, 1, 3, 3] + [1] * 123 + [3],
        "tokenizer.ggml.eos_token_id": 4,
    }
    write_gguf(tmp_path / "it.gguf", LLAMA, TENSORS, metadata=spelled)
    # Nor does the last one, which the model has no number for.
    assert Checkpoint.open(tmp_path / "it.gguf").config.eos_token_ids == (4, 1)


def test_what_a_file_says_of_sampling_is_the_default(tmp_path: Path) -> None:
    said = {"temp": 0.7, "top_k": 20, "top_p": 0.8, "penalty_repeat": 1.05}
    metadata = {f"general.sampling.{name}": value for name, value in said.items()}
    write_gguf(tmp_path / "it.gguf", LLAMA, TENSORS, metadata=metadata)
    config = Checkpoint.open(tmp_path / "it.gguf").config
    found = (config.default_temperature, config.default_top_p, config.default_repetition_penalty)
    assert found == pytest.approx((0.7, 0.8, 1.05)) and config.default_top_k == 20


@pytest.mark.parametrize(
    ("metadata", "scaling"),
    [
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, None),
        ({"llama.rope.scaling.factor": 4.0}, Linear(4.0)),
        ({"llama.rope.scale_linear": 2.0}, Linear(2.0)),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 0.0}, None),
    ],
)
def test_linear_scaling(tmp_path: Path, metadata: dict[str, Any], scaling: Any) -> None:
    write_gguf(tmp_path / "it.gguf", LLAMA, TENSORS, metadata=metadata)
    assert Checkpoint.open(tmp_path / "it.gguf").config.rope_scaling == scaling


def test_a_window_is_served_as_far_as_it_hides_nothing(tmp_path: Path) -> None:
    write_gguf(tmp_path / "it.gguf", LLAMA, TENSORS, metadata={"llama.attention.sliding_window": 100})
    with pytest.raises(ModelInvalid, match=r"sliding_window is 100: .*--max-context 100 stays"):
        Checkpoint.open(tmp_path / "it.gguf")
    assert Checkpoint.open(tmp_path / "it.gguf", 100).config.max_context == 100


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"general.architecture": "mamba"}, 'general.architecture is "mamba": it must be one of llama, qwen2, qwen3'),
        ({"llama.embedding_length": None}, "llama.embedding_length is missing: it must be an integer"),
        ({"llama.block_count": 1 << 20}, "block_count is 1048576: .* from 1 to 1024"),
        ({"llama.block_count": "2"}, 'block_count is "2": it must be an integer'),
        ({"llama.block_count": 3}, "missing 9 tensors, the first model.layers.2.input_layernorm.weight"),
        ({"llama.block_count": 1}, "unexpected tensor blk.1.attn_norm.weight"),
        ({"llama.attention.head_count": 3}, r"head_count_kv is 4: it must divide"),
        ({"llama.attention.head_count_kv": 2}, r"tensor blk.0.attn_k.weight has shape \[64, 64\], not 2 heads of 16"),
        ({"llama.attention.head_count": [4, 4]}, r"head_count is \[4, 4\]: it must be an integer"),
        ({"llama.attention.key_length": 15}, "key_length is 15: it must be even for rotary embeddings"),
        ({"llama.attention.value_length": 8}, "value_length is 8: only 16 is supported"),
        ({"llama.rope.dimension_count": 8}, "dimension_count is 8: only 16 is supported"),
        ({"llama.expert_count": 8}, "expert_count is 8: only 0 is supported"),
        ({"llama.vocab_size": 1000}, "vocab_size is 1000: only 128 is supported"),
        ({"llama.feed_forward_length": 97}, r"ffn_gate.weight has shape \[96, 64\]; .* requires \[97, 64\]"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "rms_epsilon is missing: it must be a number"),
        ({"llama.rope.freq_base": float("nan")}, "freq_base is NaN: it must be a number"),
        ({"llama.rope.scaling.type": "yarn"}, 'scaling.type is "yarn": it must be none or linear'),
        ({"general.sampling.temp": -1.0}, "sampling.temp is -1.0: it must be a number from 0 to 100"),
        ({"general.sampling.top_p": 0.0}, "sampling.top_p is 0.0: it must be more than 0"),
        ({"general.sampling.penalty_repeat": 0.0}, "sampling.penalty_repeat is 0.0: it must be more than 0"),
        ({"tokenizer.ggml.eos_token_id": 128}, "eos_token_id is 128: it must have token ids from 0 to 127"),
        ({"split.count": 3}, "split.count is 3: the files must be named NAME-00001-of-00003.gguf and so on"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_metadata_that_is_not_served_is_named(tmp_path: Path, metadata: dict[str, Any], said: str) -> None:
    file = tmp_path / "it.gguf"
    write_gguf(file, LLAMA, TENSORS, metadata=metadata)
    with pytest.raises(ModelInvalid, match=said) as caught:
        Model.load(file)
    assert str(file) in caught.value.message


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model.embed_tokens.weight": None}, "missing tensor token_embd.weight, a matrix"),
        ({"model.norm.weight": None}, "missing 1 tensors, the first model.norm.weight"),
        ({"model.norm.bias": np.zeros(64, np.float32)}, "unexpected tensor output_norm.bias"),
        ({"model.layers.0.self_attn.q_proj.bias": np.zeros(64, np.float32)}, r"attn_q.bias has shape \[64\], not"),
        ({"model.layers.0.self_attn.v_proj.bias": np.zeros(64, np.float32)}, r"unexpected tensor blk.0.attn_v.bias"),
        ({"model.norm.weight": np.full(64, np.nan, np.float32)}, "tensor output_norm.weight contains NaN or infinity"),
    ],
    ids=range(6),
)
def test_tensors_that_are_not_the_models(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    tensors = {name: tensor for name, tensor in (TENSORS | change).items() if tensor is not None}
    write_gguf(tmp_path / "it.gguf", LLAMA, tensors)
    with pytest.raises(ModelInvalid, match=said):
        Model.load(tmp_path / "it.gguf")


@pytest.mark.parametrize("bad", ["scaling too", "zero", "too many"])
def test_rotary_divisors_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: str) -> None:
    config = FAMILIES["llama3"]
    factors = np.ones(9 if bad == "too many" else 8, np.float32)
    factors[3] = bad != "zero"
    monkeypatch.setattr("tests.models.gguf_files.rope_factors", lambda config: factors)
    metadata = {"llama.rope.scaling.factor": 2.0} if bad == "scaling too" else {}
    write_gguf(tmp_path / "it.gguf", config, family_tensors(config, 0), metadata=metadata)
    with pytest.raises(ModelInvalid, match=r"tensor rope_freqs\.weight"):
        Checkpoint.open(tmp_path / "it.gguf")


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q5_K, Kind.Q6_K])
def test_wide_models_from_the_types_of_large_blocks(tmp_path: Path, kind: Kind) -> None:
    config = llama_config(hidden=256, intermediate=256, head_dim=64, layers=1, tied=False)
    tensors = random_tensors(config)
    kept = write_gguf(tmp_path / "it.gguf", config, tensors, kind=kind)
    ids = np.random.default_rng(0).integers(0, 128, PROMPT_TOKENS).tolist()
    expected, _, _ = plain_forward.forward((config, kept), ids)
    found = logits_of(Model.load(tmp_path / "it.gguf"), ids)
    assert np.abs(found - expected[-1]).max() <= 1e-4 * np.abs(expected).max()

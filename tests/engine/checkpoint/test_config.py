# mypy: disable-error-code="arg-type"
"""config.json and generation_config.json: what is read, and what is refused by name rather than ignored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.common.errors import ModelInvalid
from services.engine.checkpoint.config import FAMILIES, ModelConfig
from services.engine.checkpoint.rope import Linear, Llama3
from services.engine.sampling.params import validate
from tests.models.checkpoints import llama_config

ABSENT = object()


def write(folder: Path, generation: dict[str, Any] | None = None, **changes: Any) -> Path:
    """A folder whose config.json has these keys changed, or left out."""
    config = {key: value for key, value in (llama_config() | changes).items() if value is not ABSENT}
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def read(folder: Path, generation: dict[str, Any] | None = None, **changes: Any) -> ModelConfig:
    return ModelConfig.from_folder(write(folder, generation, **changes))


def test_the_bundled_model() -> None:
    config = ModelConfig.from_folder(Path(__file__).parents[3] / "models/shakespeare")
    assert config.architecture == "LlamaForCausalLM"
    assert (config.hidden_size, config.query_heads, config.kv_heads, config.head_dim) == (256, 4, 2, 64)
    assert (config.vocab_size, config.max_context) == (1024, 1024)
    assert config.eos_token_ids == (0,)
    assert config.tied_embeddings


def test_every_key_is_read(tmp_path: Path) -> None:
    assert read(tmp_path, {"temperature": 0.6, "top_k": 50, "top_p": 0.9, "do_sample": True}) == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=128,
        hidden_size=64,
        layers=2,
        query_heads=4,
        kv_heads=2,
        head_dim=16,
        intermediate_size=96,
        max_context=512,
        rope_theta=10000.0,
        rms_norm_eps=1e-5,
        tied_embeddings=True,
        eos_token_ids=(0,),
        bos_token_id=0,
        default_temperature=0.6,
        default_top_k=50,
        default_top_p=0.9,
    )


def test_what_older_configurations_leave_out_is_the_formats_default(tmp_path: Path) -> None:
    absent = dict.fromkeys(
        ("num_key_value_heads", "head_dim", "rope_theta", "rms_norm_eps", "tie_word_embeddings", "hidden_act"), ABSENT
    )
    config = read(tmp_path, **absent, max_position_embeddings=ABSENT, bos_token_id=ABSENT, eos_token_id=ABSENT)
    assert (config.kv_heads, config.head_dim, config.rope_theta) == (4, 16, 10000.0)
    assert (config.rms_norm_eps, config.tied_embeddings, config.max_context) == (1e-6, False, 2048)
    assert (config.eos_token_ids, config.bos_token_id) == ((), None)
    assert (config.default_temperature, config.default_top_k, config.default_top_p) == (None, None, None)
    assert config.default_repetition_penalty is None


def test_a_repetition_penalty_is_a_default_as_well(tmp_path: Path) -> None:
    config = read(tmp_path, {"repetition_penalty": 1.25})
    assert config.default_repetition_penalty == 1.25
    assert validate(None, None, None, None, 1, config).repetition_penalty == 1.25
    assert validate(None, None, None, None, 1, config, repetition_penalty=1.0).repetition_penalty == 1.0


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 5e5},
        {"rope_theta": ABSENT, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"rope_theta": ABSENT, "rope_scaling": {"rope_theta": 5e5, "type": "default"}},
        {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}},
        {"rope_theta": 500000, "rope_parameters": None, "rope_scaling": None},
    ],
)
def test_theta_may_stand_in_three_places(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert read(tmp_path, **changes).rope_theta == 5e5


def test_the_ends_of_text_are_those_of_generation_config(tmp_path: Path) -> None:
    assert read(tmp_path, eos_token_id=3).eos_token_ids == (3,)
    assert read(tmp_path, eos_token_id=[3, 4]).eos_token_ids == (3, 4)
    assert read(tmp_path, {"eos_token_id": [5, 6, 7]}, eos_token_id=3).eos_token_ids == (5, 6, 7)
    assert read(tmp_path, {"eos_token_id": 0}, eos_token_id=3).eos_token_ids == (0,)
    assert read(tmp_path, {"bos_token_id": 2}, bos_token_id=1).bos_token_id == 2
    assert read(tmp_path, {}, eos_token_id=None, bos_token_id=None).eos_token_ids == ()


def test_a_model_that_says_it_does_not_sample_is_greedy(tmp_path: Path) -> None:
    assert read(tmp_path, {"do_sample": False, "temperature": 0.9}).default_temperature == 0
    assert read(tmp_path, {"temperature": 0.9}).default_temperature == 0.9
    assert read(tmp_path, {"top_k": 0}).default_top_k == 0


@pytest.mark.parametrize(
    "key,value,said",
    [
        ("architectures", ["MambaForCausalLM"], "it must be one of LlamaForCausalLM"),
        ("architectures", [], "it must be one of"),
        ("architectures", ABSENT, "it must be one of"),
        ("architectures", "LlamaForCausalLM", "it must be one of"),
        ("architectures", [["LlamaForCausalLM"]], "it must be one of"),
        ("hidden_act", "gelu", 'only "silu" is supported'),
        ("attention_bias", True, "only false is supported"),
        ("mlp_bias", True, "only false is supported"),
        ("partial_rotary_factor", 0.5, "only 1 is supported"),
        ("quantization_config", {"bits": 4}, "only null is supported"),
        ("rope_scaling", "linear", "an object"),
        ("vocab_size", ABSENT, "integer from 1"),
        ("vocab_size", 0, "integer from 1"),
        ("vocab_size", -5, "integer from 1"),
        ("vocab_size", 128.0, "integer from 1"),
        ("vocab_size", True, "integer from 1"),
        ("vocab_size", "128", "integer from 1"),
        ("hidden_size", 2**40, "to 16777216"),
        ("hidden_size", 10**400, "to 16777216"),
        ("num_hidden_layers", 0, "integer from 1"),
        ("num_hidden_layers", 1 << 20, "from 1 to 1024"),
        ("num_attention_heads", ABSENT, "integer from 1"),
        ("num_key_value_heads", 3, "must divide num_attention_heads, 4"),
        ("head_dim", 15, "even"),
        ("intermediate_size", ABSENT, "integer from 1"),
        ("max_position_embeddings", 0, "integer from 1"),
        ("rope_theta", -1.0, "a number from 1 to"),
        ("rope_theta", float("nan"), "a number from 1 to"),
        ("rope_theta", 10**400, "a number from 1 to"),
        ("rms_norm_eps", "1e-5", "a number from 0 to 1"),
        ("rms_norm_eps", float("inf"), "a number from 0 to 1"),
        ("tie_word_embeddings", 1, "true or false"),
        ("tie_word_embeddings", None, "true or false"),
        ("eos_token_id", 128, "token ids from 0 to 127"),
        ("eos_token_id", [0, -1], "token ids from 0 to 127"),
        ("eos_token_id", "</s>", "token ids from 0 to 127"),
        ("bos_token_id", 1.5, "token ids from 0 to 127"),
    ],
)
def test_what_is_wrong_is_named_with_file_key_and_value(tmp_path: Path, key: str, value: Any, said: str) -> None:
    with pytest.raises(ModelInvalid, match=said) as caught:
        read(tmp_path, **{key: value})
    message = caught.value.message
    assert f"config.json: {key} is " in message
    assert len(message) < 400
    assert ("missing" if value is ABSENT else json.dumps(value)[:50]) in message


def test_how_the_families_differ(tmp_path: Path) -> None:
    absent = dict.fromkeys(("num_key_value_heads", "head_dim", "max_position_embeddings"), ABSENT)
    found = {}
    for name in FAMILIES:
        config = read(tmp_path, architectures=[name], **absent, num_attention_heads=32, sliding_window=None)
        assert config.architecture == name
        told = (config.qkv_bias, config.qk_norm, config.kv_heads, config.head_dim, config.max_context)
        found[name.removesuffix("ForCausalLM")] = told
    assert found == {
        "Llama": (False, False, 32, 2, 2048),
        "Mistral": (False, False, 8, 2, 131072),
        "Qwen2": (True, False, 32, 2, 32768),
        "Qwen3": (False, True, 32, 128, 32768),
    }
    # null is not the same as nothing.
    heads = read(tmp_path, architectures=["MistralForCausalLM"], num_key_value_heads=None, sliding_window=None).kv_heads
    assert heads == 4


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("given", "scaling"),
    [
        ({"rope_scaling": LLAMA3}, Llama3(8.0, 1.0, 4.0, 8192)),
        ({"rope_parameters": LLAMA3 | {"rope_theta": 5e5}}, Llama3(8.0, 1.0, 4.0, 8192)),
        ({"rope_scaling": LLAMA3, "rope_parameters": LLAMA3}, Llama3(8.0, 1.0, 4.0, 8192)),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, Linear(2.0)),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.5}}, Linear(2.5)),
        ({"rope_scaling": {"rope_type": "default"}}, None),
        ({"rope_scaling": None}, None),
    ],
)
def test_rotary_scaling(tmp_path: Path, given: dict[str, Any], scaling: Any) -> None:
    assert read(tmp_path, **given).rope_scaling == scaling


@pytest.mark.parametrize(
    ("inner", "key", "said"),
    [
        ({"rope_type": "yarn", "factor": 4.0}, "rope_type", "it must be one of default, linear, llama3"),
        ({"type": "dynamic", "factor": 4.0}, "type", "it must be one of default, linear, llama3"),
        ({"rope_type": "longrope"}, "rope_type", "it must be one of"),
        ({"rope_type": ["linear"]}, "rope_type", "it must be one of"),
        ({"rope_type": "linear"}, "factor", "a number from 1 to"),
        ({"rope_type": "linear", "factor": 0}, "factor", "a number from 1 to"),
        (LLAMA3 | {"factor": "8"}, "factor", "a number from 1 to"),
        (LLAMA3 | {"low_freq_factor": None}, "low_freq_factor", "a number from 0 to"),
        (LLAMA3 | {"high_freq_factor": 1.0}, "high_freq_factor", "more than low_freq_factor, 1"),
        (LLAMA3 | {"original_max_position_embeddings": 0}, "original_max_position_embeddings", "an integer"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor", "only 1 is supported"),
    ],
)
def test_rotary_scaling_that_is_not_served(tmp_path: Path, inner: Any, key: str, said: str) -> None:
    for place in ("rope_scaling", "rope_parameters"):
        with pytest.raises(ModelInvalid, match=rf"config\.json: {place}\.{key} is .*{said}"):
            read(tmp_path, **{place: inner})


def test_two_scalings_that_differ(tmp_path: Path) -> None:
    with pytest.raises(ModelInvalid, match=r"rope_parameters is .*: it contradicts rope_scaling"):
        read(tmp_path, rope_scaling=LLAMA3, rope_parameters={"rope_type": "linear", "factor": 2.0})


QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 100, "max_window_layers": 1}


@pytest.mark.parametrize(
    "keys",
    [
        {"architectures": ["MistralForCausalLM"], "sliding_window": 100},
        {**QWEN2, "use_sliding_window": True},
        {**QWEN2, "use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]},
        {**QWEN2, "architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True, "max_window_layers": 0},
    ],
)
def test_a_window_is_served_as_far_as_it_hides_nothing(tmp_path: Path, keys: dict[str, Any]) -> None:
    folder = write(tmp_path, **keys)
    with pytest.raises(ModelInvalid, match=r"sliding_window is 100: .* --max-context 100 stays within the window"):
        ModelConfig.from_folder(folder)
    with pytest.raises(ModelInvalid, match="sliding_window is 100"):
        ModelConfig.from_folder(folder, 101)
    assert ModelConfig.from_folder(folder, 100).max_context == 100


@pytest.mark.parametrize(
    "keys",
    [
        {"sliding_window": 100},  # which Llama does not look at
        {"architectures": ["MistralForCausalLM"], "sliding_window": None},
        {"architectures": ["MistralForCausalLM"], "sliding_window": 512},
        {"architectures": ["MistralForCausalLM"]},  # 4096
        {"architectures": ["MistralForCausalLM"], "sliding_window": 100, "layer_types": ["full_attention"] * 2},
        QWEN2,
        {**QWEN2, "use_sliding_window": False},
        {**QWEN2, "use_sliding_window": True, "max_window_layers": 2},
        {**QWEN2, "use_sliding_window": True, "sliding_window": None},
    ],
)
def test_a_window_that_hides_nothing(tmp_path: Path, keys: dict[str, Any]) -> None:
    assert read(tmp_path, **keys).max_context == 512


def test_a_context_that_is_not_the_models(tmp_path: Path) -> None:
    folder = write(tmp_path)
    assert ModelConfig.from_folder(folder, 7).max_context == 7
    with pytest.raises(ModelInvalid, match=r"--max-context 513: the context of .*config\.json is 512"):
        ModelConfig.from_folder(folder, 513)


@pytest.mark.parametrize(
    ("architecture", "key", "value", "said"),
    [
        ("Qwen3ForCausalLM", "attention_bias", True, "only false is supported"),
        ("MistralForCausalLM", "sliding_window", 0, "integer from 1"),
        ("Qwen2ForCausalLM", "use_sliding_window", 1, "true or false"),
        ("MistralForCausalLM", "layer_types", "full_attention", "a list"),
        ("Qwen2ForCausalLM", "num_key_value_heads", ABSENT, "must divide num_attention_heads, 4"),
    ],
)
def test_what_is_wrong_in_one_family(tmp_path: Path, architecture: str, key: str, value: Any, said: str) -> None:
    with pytest.raises(ModelInvalid, match=rf"config\.json: {key} is .*{said}"):
        read(tmp_path, architectures=[architecture], **{key: value})


def test_heads_that_do_not_divide_the_width_need_their_own(tmp_path: Path) -> None:
    with pytest.raises(ModelInvalid, match="without head_dim it must divide hidden_size, 66"):
        read(tmp_path, hidden_size=66, head_dim=ABSENT)
    assert read(tmp_path, hidden_size=66).head_dim == 16


@pytest.mark.parametrize(
    "key,value",
    [
        ("temperature", -1),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -1),
        ("top_k", 0.5),
        ("repetition_penalty", 0),
        ("repetition_penalty", 101),
        ("eos_token_id", 999),
    ],
)
def test_generation_config_is_checked_as_well(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(ModelInvalid, match=rf"generation_config\.json: {key} is "):
        read(tmp_path, {key: value})


@pytest.mark.parametrize(
    "content,said",
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"1" * 10_000, "is not JSON"),
        (b"[]", "is not a JSON object"),
        (b" " * (1 << 21), "larger than"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_file_that_is_none(tmp_path: Path, content: bytes, said: str, name: str) -> None:
    write(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelInvalid, match=said) as caught:
        ModelConfig.from_folder(tmp_path)
    assert str(tmp_path / name) in caught.value.message


def test_a_missing_folder_and_a_folder_in_the_place_of_a_file(tmp_path: Path) -> None:
    with pytest.raises(ModelInvalid, match=r"config\.json cannot be read: No such file"):
        ModelConfig.from_folder(tmp_path / "absent")
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ModelInvalid, match="cannot be read"):
        ModelConfig.from_folder(tmp_path)

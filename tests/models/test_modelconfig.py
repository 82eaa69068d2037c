"""config.json and generation_config.json: what is read, and what is refused by name rather than ignored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.engine.modelconfig import ModelConfig
from services.errors import ModelInvalid
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
    config = ModelConfig.from_folder(Path(__file__).parents[2] / "models/shakespeare")
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
        ("architectures", ["MambaForCausalLM"], "served are LlamaForCausalLM"),
        ("architectures", [], "served are"),
        ("architectures", ABSENT, "served are"),
        ("architectures", "LlamaForCausalLM", "served are"),
        ("architectures", [["LlamaForCausalLM"]], "served are"),
        ("hidden_act", "gelu", 'only "silu" is served'),
        ("attention_bias", True, "only false is served"),
        ("mlp_bias", True, "only false is served"),
        ("partial_rotary_factor", 0.5, "only 1 is served"),
        ("quantization_config", {"bits": 4}, "only null is served"),
        ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}, "only rope_type default"),
        ("rope_scaling", {"type": "linear", "factor": 2.0}, "only rope_type default"),
        ("rope_scaling", "linear", "an object"),
        ("rope_parameters", {"rope_type": "yarn"}, "only rope_type default"),
        ("vocab_size", ABSENT, "whole number from 1"),
        ("vocab_size", 0, "whole number from 1"),
        ("vocab_size", -5, "whole number from 1"),
        ("vocab_size", 128.0, "whole number from 1"),
        ("vocab_size", True, "whole number from 1"),
        ("vocab_size", "128", "whole number from 1"),
        ("hidden_size", 2**40, "to 16777216"),
        ("hidden_size", 10**400, "to 16777216"),
        ("num_hidden_layers", 0, "whole number from 1"),
        ("num_attention_heads", ABSENT, "whole number from 1"),
        ("num_key_value_heads", 3, "must divide num_attention_heads, 4"),
        ("head_dim", 15, "even"),
        ("intermediate_size", ABSENT, "whole number from 1"),
        ("max_position_embeddings", 0, "whole number from 1"),
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
    assert json.dumps(None if value is ABSENT else value)[:50] in message


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

"""Sampling settings in a model's files: defaults that are supported, settings without effect, unsupported settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from services.engine.checkpoint.fields import Fields

#: Supported fields of ``generation_config.json``: request defaults, end-of-sequence ids, and banned tokens.
SERVED = frozenset(
    (
        "do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "suppress_tokens",
        "begin_suppress_tokens", "eos_token_id", "bos_token_id",
    )
)  # fmt: skip
#: Unsupported fields that change the output, with the values, besides null, at which they have no effect.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "bad_words_ids": ([],),
    "constraints": ([],),
    "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "guidance_scale": (1,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "penalty_alpha": (0,),
    "remove_invalid_values": (False,),
    "sequence_bias": ([], {}),
    "stop_strings": ([],),
    "token_healing": (False,),
    "top_h": (),
    "typical_p": (1,),
    "watermarking_config": (),
}
#: Fields that never change a sampled token: lengths, performance, additional outputs, fields that only modify another
#: field, and provenance.
INERT = frozenset(
    (
        "_from_model_config", "_commit_hash", "assistant_confidence_threshold", "assistant_early_exit",
        "assistant_ensemble_weight", "assistant_lookbehind", "cache_config", "cache_implementation", "compile_config",
        "continuous_batching_config", "decoder_start_token_id", "disable_compile", "diversity_penalty",
        "early_stopping", "is_assistant", "length_penalty", "low_memory", "max_cache_len", "max_length",
        "max_matching_ngram_size", "max_new_tokens", "max_time", "num_assistant_tokens",
        "num_assistant_tokens_schedule", "num_return_sequences", "output_attentions", "output_hidden_states",
        "output_logits", "output_scores", "pad_token_id", "prefill_chunk_size", "prompt_lookup_num_tokens",
        "renormalize_logits", "return_dict_in_generate", "return_legacy_cache", "speculation_type", "target_lookbehind",
        "transformers_version", "use_cache", "use_mtp",
    )
)  # fmt: skip

#: The prefix of GGUF sampling keys, and the supported ones: key -> field of ``generation_config.json``.
_GGUF = "general.sampling."
GGUF_SERVED = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty",
}  # fmt: skip
#: Like `NEUTRAL`. Any other key is reported as unsupported.
GGUF_NEUTRAL: dict[str, tuple[Any, ...]] = {"mirostat": (0,), "penalty_last_n": (-1,), "xtc_probability": (0,)}
#: Keys that only modify another key.
GGUF_INERT = frozenset(("mirostat_tau", "mirostat_eta", "xtc_threshold"))


def generation_fields(folder: Path, config: Fields) -> Fields:
    """Returns the fields of a folder's ``generation_config.json``.

    Without that file, returns those that ``config.json`` has, where older checkpoints keep them. A
    ``generation_config.json`` replaces them all, as in ``transformers``. Raises ``ModelInvalid``.
    """
    file = folder / "generation_config.json"
    if file.exists():
        return Fields.of(file)
    known = SERVED | INERT | NEUTRAL.keys()  # any other field of config.json describes the model
    return Fields(config.path, {key: value for key, value in config.values.items() if key in known})


def of_folder(generation: Fields, vocab_size: int) -> dict[str, Any]:
    """Returns fields of `ModelConfig` from its `generation_fields`. Raises ``ModelInvalid``."""
    found = _defaults(generation, "temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    if generation.values.get("do_sample") is False:
        found["default_temperature"] = 0.0
    known = SERVED | INERT
    unserved = [key for key in generation.values if key not in known and not _neutral(generation, key, NEUTRAL)]
    return found | {
        "suppressed_tokens": generation.token_ids("suppress_tokens", vocab_size),
        "begin_suppressed_tokens": generation.token_ids("begin_suppress_tokens", vocab_size),
        "unserved_sampling": tuple((key, generation.values[key]) for key in unserved),
    }


def of_gguf(metadata: Fields) -> dict[str, Any]:
    """Returns fields of `ModelConfig` from a GGUF file's metadata. Raises ``ModelInvalid``."""
    found = _defaults(metadata, *(_GGUF + name for name in GGUF_SERVED))
    known = {_GGUF + name for name in (*GGUF_SERVED, *GGUF_INERT)}
    if found["default_repetition_penalty"] in (None, 1.0):
        known.add(f"{_GGUF}penalty_last_n")  # the window of a penalty that is off
    neutral = {_GGUF + name: values for name, values in GGUF_NEUTRAL.items()}
    unserved = [
        key
        for key in metadata.values
        if key.startswith(_GGUF) and key not in known and not _neutral(metadata, key, neutral)
    ]
    return found | {"unserved_sampling": tuple((key, metadata.values[key]) for key in unserved)}


def _neutral(keys: Fields, key: str, neutral: dict[str, tuple[Any, ...]]) -> bool:
    value = keys.values[key]
    return value is None or value in neutral.get(key, ())


def _defaults(keys: Fields, temperature: str, top_k: str, top_p: str, min_p: str, repetition: str) -> dict[str, Any]:
    found = {
        "default_temperature": keys.optional_number(temperature, 0.0, 100.0),
        "default_top_k": keys.integer(top_k, least=0) if keys.has(top_k) else None,
        "default_top_p": keys.optional_number(top_p, 0.0, 1.0),
        "default_min_p": keys.optional_number(min_p, 0.0, 1.0),
        "default_repetition_penalty": keys.optional_number(repetition, 0.0, 100.0),
    }
    for key in (top_p, repetition):
        if keys.values.get(key) == 0:
            keys.refuse(key, "it must be more than 0")
    if keys.values.get(min_p) == 1:
        keys.refuse(min_p, "it must be less than 1")
    return found

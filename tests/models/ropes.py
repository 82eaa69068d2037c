"""Rotary embeddings of published models, as their ``config.json`` has them, and some that try the edges."""

from __future__ import annotations

from typing import Any


def _llama3(factor: float, low: float = 1.0, high: float = 4.0, original: int = 8192) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


ROPES: dict[str, dict[str, Any]] = {
    "llama-2-7b": {"head_dim": 128, "rope_theta": 10000.0, "rope_scaling": None},
    "llama-3.1-8b": {"head_dim": 128, "rope_theta": 500000.0, "rope_scaling": _llama3(8.0)},
    "llama-3.2-1b": {"head_dim": 64, "rope_theta": 500000.0, "rope_scaling": _llama3(32.0)},
    "mistral-7b-v0.3": {"head_dim": 128, "rope_theta": 1000000.0, "rope_scaling": None},
    "qwen3-0.6b": {"head_dim": 128, "rope_theta": 1000000.0, "rope_scaling": None},
    "linear-2.5": {"head_dim": 80, "rope_theta": 10000.0, "rope_scaling": {"rope_type": "linear", "factor": 2.5}},
    "llama3-odd": {"head_dim": 96, "rope_theta": 25000.0, "rope_scaling": _llama3(3.5, 2.0, 2.5, 1000)},
}

# mypy: disable-error-code="arg-type"
"""Write what `transformers` computes for the checkpoints of `families.py`, for the engine to be compared with.

    python -m tests.models.references.make_references references.npz

In float32, on the CPU. For each family:

    {family}_logits   float32 [96, 128]     the logits at every position of the prompt
    {family}_greedy   int64 [64]            what greedy generation adds
    {family}_margin   float32 [64]          how far each of these was ahead of the second best, in logits
    {family}_long     float32 [3, 128]      the logits at some positions of a prompt of thousands of tokens

and, for the rotary embeddings of models that many people have, their frequencies:

    frequencies_{name}   float32 [head_dim / 2]

Needs torch, transformers, safetensors and numpy.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.models.families import (
    FAMILIES,
    GREEDY_TOKENS,
    LONG,
    LONG_POSITIONS,
    SEEDS,
    family_tensors,
    long_prompt_of,
    prompt_of,
)
from tests.models.ropes import ROPES


def load(config: dict[str, Any], seed: int) -> Any:
    """The model of a family."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        save_file(family_tensors(config, seed), Path(folder, "model.safetensors"), metadata={"format": "pt"})
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True, attn_implementation="eager"
        )
    if left := {name: list(value) for name, value in report.items() if value}:
        raise ValueError(f"{config}: {left}")
    return model.eval()


@torch.no_grad()
def reference(family: str, config: dict[str, Any], seed: int) -> dict[str, NDArray[Any]]:
    """The arrays of a family."""
    model = load(config, seed)
    ids = prompt_of(seed)
    logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    arrays = {f"{family}_logits": logits.numpy()}
    greedy, margins = list[Any](), list[Any]()
    for _ in range(GREEDY_TOKENS):
        last = model(input_ids=torch.tensor([ids + greedy]), use_cache=False).logits[0, -1]
        top = last.topk(2)
        greedy.append(int(top.indices[0]))
        margins.append(float(top.values[0] - top.values[1]))
    arrays[f"{family}_greedy"] = np.array(greedy, np.int64)
    arrays[f"{family}_margin"] = np.array(margins, np.float32)
    long = load(config | LONG, seed)(input_ids=torch.tensor([long_prompt_of(seed)]), use_cache=False).logits[0]
    arrays[f"{family}_long"] = long[LONG_POSITIONS].numpy()
    print(f"{family}: {type(model).__name__}, smallest margin {min(margins):.4f}")
    return arrays


def frequencies(rope: dict[str, Any]) -> NDArray[np.float32]:
    """The frequencies that `transformers` takes for a configuration of rotary embeddings."""
    heads = 4
    config = {"hidden_size": heads * rope["head_dim"], "num_attention_heads": heads, "max_position_embeddings": 131072}
    return LlamaRotaryEmbedding(LlamaConfig.from_dict(config | rope)).inv_freq.numpy()


def main() -> None:
    """Write the file."""
    arrays: dict[str, NDArray[Any]] = {}
    for family, config in FAMILIES.items():
        arrays |= reference(family, config, SEEDS[family])
    for name, rope in ROPES.items():
        arrays[f"frequencies_{name}"] = frequencies(rope)
        print(name, arrays[f"frequencies_{name}"][[0, 1, -2, -1]])
    np.savez_compressed(sys.argv[1], **arrays)
    print(f"transformers {transformers.__version__}, torch {torch.__version__}")


if __name__ == "__main__":
    main()

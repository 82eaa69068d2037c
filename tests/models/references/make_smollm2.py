# mypy: disable-error-code="var-annotated"
"""Write what other implementations make of SmolLM2-135M-Instruct's file, for the engine to be compared with.

    python -m tests.models.references.make_smollm2 build/models/SmolLM2-135M-Instruct.Q4_1.gguf

Tokens are llama.cpp's. Chats are rendered, and everything is computed, by `transformers`, which widens the file's
numbers: float32, on the CPU. It writes `smollm2.json`,

    texts    the token ids of each text of `smollm2.py`, then of the random ones
    chats    by name: the text of the prompt, its token ids, what greedy generation adds, and by how many logits the
             closest of these choices was ahead of the second best

and `smollm2.npz`, of the excerpt, n tokens:

    token_ids     int32 [n]
    logprobs      float32 [n - 1]   log-probability of each token but the first
    top_ids       int32 [n - 1, 3]  the likeliest ones there
    top_logprobs  float32 [n - 1, 3]

Needs torch, transformers, gguf, llama-cpp-python and numpy.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.utils.chat_template_utils import render_jinja_template

from tests.models.references.smollm2 import CHATS, EXCERPT, LOGPROBS, MOST_TOKENS, REFERENCES, TEXTS, random_texts


@torch.no_grad()
def greedy(model: Any, ids: list[int], most: int) -> tuple[list[int], float]:
    """What is added, up to the token that ends a turn, and the smallest margin."""
    end = model.config.eos_token_id
    added, margins, cache = [], [], None
    feed = ids
    while len(added) < most and (not added or added[-1] != end):
        done = model(input_ids=torch.tensor([feed]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        top, cache = done.logits[0, -1].topk(2), done.past_key_values
        added.append(int(top.indices[0]))
        margins.append(float(top.values[0] - top.values[1]))
        feed = added[-1:]
    return added, min(margins)


@torch.no_grad()
def logprobs(model: Any, ids: list[int]) -> dict[str, np.ndarray]:
    """Of a prompt's tokens."""
    each = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1].log_softmax(-1)
    top = each.topk(3)
    of = each.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return {
        "token_ids": np.array(ids, np.int32),
        "logprobs": of.numpy(),
        "top_ids": top.indices.numpy().astype(np.int32),
        "top_logprobs": top.values.numpy(),
    }


def lines(values: list[Any] | dict[str, Any]) -> str:
    """The inside of a JSON list or object, a line to each value."""
    pairs = values.items() if isinstance(values, dict) else ((None, value) for value in values)
    named = (("" if name is None else f"{json.dumps(name)}: ") + json.dumps(value) for name, value in pairs)
    return ",\n".join(named)


def main() -> None:
    """Write both files."""
    file = Path(sys.argv[1])
    words = llama_cpp.Llama(model_path=str(file), vocab_only=True, verbose=False)
    template = words.metadata["tokenizer.chat_template"]
    model, report = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        dtype=torch.float32,
        output_loading_info=True,
        attn_implementation="eager",
    )
    if left := {name: list(value) for name, value in report.items() if value}:
        raise ValueError(f"{file}: {left}")
    model.eval()
    print(type(model).__name__, model.config)

    def tokens(text: str, special: bool) -> list[int]:
        return list(words.tokenize(text.encode(), add_bos=False, special=special))

    chats = {}
    for name, messages in CHATS.items():
        [prompt], _ = render_jinja_template([messages], chat_template=template, add_generation_prompt=True)
        ids = tokens(prompt, special=True)
        added, margin = greedy(model, ids, MOST_TOKENS[name])
        chats[name] = {"prompt": prompt, "token_ids": ids, "greedy": added, "margin": round(margin, 4)}
        print(f"{name}: {len(ids)} tokens, margin {margin:.4f}: {words.detokenize(added).decode()!r}")
    np.savez_compressed(LOGPROBS, **logprobs(model, tokens(EXCERPT, special=True)))
    texts = [tokens(text, special=True) for text in [*TEXTS, *random_texts()]]
    REFERENCES.write_text(f'{{"texts": [\n{lines(texts)}\n], "chats": {{\n{lines(chats)}\n}}}}\n', encoding="utf-8")
    print(
        f"transformers {transformers.__version__}, torch {torch.__version__}, llama-cpp-python {llama_cpp.__version__}"
    )


if __name__ == "__main__":
    main()

"""Write what `transformers` computes for the bundled model, for this repository's own engine to be compared with.

    python models/reference.py

The float16 weights are read and computed with in float32 on the CPU. The `.npz` file holds, for each of the prompts
`long`, `name`, `line` and `passage`:

    {prompt}_ids      int64 [n]            the prompt; exactly 512 tokens for `long`
    {prompt}_logits   float32 [n, vocab]   the logits at every position

and, for all but `long`, what greedy generation adds:

    {prompt}_greedy   int64 [m]            up to 64 tokens; the end-of-text token is the last one if it was reached
    {prompt}_margin   float32 [m]          how far each of them was ahead of the second best, in logits

Needs torch, transformers, safetensors, tokenizers and numpy.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

ROOT = Path(__file__).resolve().parents[1]
LONG_TOKENS = 512
GREEDY_TOKENS = 64

# Sonnets 18, 116 and 130: Shakespeare, and not in the text the model learned.
SONNETS = """Shall I compare thee to a summer's day?
Thou art more lovely and more temperate:
Rough winds do shake the darling buds of May,
And summer's lease hath all too short a date;
Sometime too hot the eye of heaven shines,
And often is his gold complexion dimm'd;
And every fair from fair sometime declines,
By chance or nature's changing course untrimm'd;
But thy eternal summer shall not fade,
Nor lose possession of that fair thou ow'st;
Nor shall death brag thou wander'st in his shade,
When in eternal lines to time thou grow'st:
So long as men can breathe or eyes can see,
So long lives this, and this gives life to thee.

Let me not to the marriage of true minds
Admit impediments. Love is not love
Which alters when it alteration finds,
Or bends with the remover to remove:
O no! it is an ever-fixed mark
That looks on tempests and is never shaken;
It is the star to every wandering bark,
Whose worth's unknown, although his height be taken.
Love's not Time's fool, though rosy lips and cheeks
Within his bending sickle's compass come:
Love alters not with his brief hours and weeks,
But bears it out even to the edge of doom.
If this be error and upon me proved,
I never writ, nor no man ever loved.

My mistress' eyes are nothing like the sun;
Coral is far more red than her lips' red;
If snow be white, why then her breasts are dun;
If hairs be wires, black wires grow on her head.
I have seen roses damask'd, red and white,
But no such roses see I in her cheeks;
And in some perfumes is there more delight
Than in the breath that from my mistress reeks.
"""

PROMPTS = {
    "long": "<|endoftext|>" + SONNETS,
    "name": "ROMEO:\n",
    "line": "To be, or not to be",
    "passage": "<|endoftext|>",
}


@torch.no_grad()
def reference(model: LlamaForCausalLM, tokenizer: Tokenizer) -> dict[str, NDArray[Any]]:
    """Compute the arrays that this file's first lines describe, by name."""
    arrays: dict[str, NDArray[Any]] = {}
    for name, prompt in PROMPTS.items():
        ids = tokenizer.encode(prompt).ids
        if name == "long":
            if len(ids) < LONG_TOKENS:
                raise ValueError(f"the long prompt has {len(ids)} tokens; at least {LONG_TOKENS} are needed")
            ids = ids[:LONG_TOKENS]
        tokens = torch.tensor([ids])
        arrays[f"{name}_ids"] = np.array(ids, dtype=np.int64)
        arrays[f"{name}_logits"] = model(input_ids=tokens, use_cache=False).logits[0].numpy()
        if name == "long":
            continue
        full = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            do_sample=False,
            temperature=None,
            max_new_tokens=GREEDY_TOKENS,
        )
        top = model(input_ids=full[:, :-1], use_cache=False).logits[0, len(ids) - 1 :].topk(2).values
        arrays[f"{name}_greedy"] = full[0, len(ids) :].numpy()
        arrays[f"{name}_margin"] = (top[:, 0] - top[:, 1]).numpy()
    return arrays


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the file and print what is in it; returns the process's exit status."""
    parser = argparse.ArgumentParser(
        description="Write what transformers computes for the bundled model, in float32 on the CPU.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", type=Path, default=ROOT / "models/shakespeare", metavar="DIR", help="model folder")
    out = ROOT / "tests/models/references/reference_logits.npz"
    parser.add_argument("--out", type=Path, default=out, metavar="FILE", help="file to write")
    flags = parser.parse_args(arguments)
    if not (flags.model / "model.safetensors").is_file():
        parser.error(f"argument --model: no model.safetensors in {flags.model}")
    if flags.out.is_dir() or flags.out.suffix != ".npz":
        parser.error(f"argument --out: {flags.out} is not the name of a .npz file")

    tokenizer = Tokenizer.from_file(str(flags.model / "tokenizer.json"))
    model = LlamaForCausalLM.from_pretrained(flags.model, dtype=torch.float32).eval()
    arrays = reference(model, tokenizer)
    flags.out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(flags.out, **arrays)
    for name, array in arrays.items():
        print(f"{name:16} {array.dtype!s:8} {array.shape}")
    for name in PROMPTS:
        if f"{name}_greedy" in arrays:
            text = tokenizer.decode([*arrays[f"{name}_ids"], *arrays[f"{name}_greedy"]], skip_special_tokens=False)
            print(f"--- {name}, closest call {arrays[f'{name}_margin'].min():.4f}\n{text}")
    print(f"{flags.out.name}: {flags.out.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())

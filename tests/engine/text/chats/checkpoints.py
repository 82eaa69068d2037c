"""A small model with a chat template and the tokenizer of `vocabulary.py`, as a folder or a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.engine.text.chats import vocabulary
from tests.engine.text.chats.conversations import SPECIAL, SPECIAL_TOKENS
from tests.models.checkpoints import llama_config, random_tensors, write_checkpoint
from tests.models.gguf_files import write_gguf

END = SPECIAL_TOKENS.index("<|im_end|>")
VOCAB = vocabulary.tokenizer().get_vocab_size()
CONFIG = llama_config(vocab=VOCAB, layers=1, context=1024) | {"eos_token_id": END}


def chat_folder(folder: Path, template: str) -> Path:
    """A Hugging Face folder with a template in its tokenizer_config.json."""
    write_checkpoint(folder, CONFIG, random_tensors(CONFIG))
    vocabulary.tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, **SPECIAL}))
    return folder


def chat_file(path: Path, template: str) -> Path:
    """A GGUF file with a template among its keys."""
    tokenizer = vocabulary.tokenizer()
    model = json.loads(tokenizer.to_str())["model"]
    words = sorted(model["vocab"], key=model["vocab"].__getitem__)
    added = {number: token.special for number, token in tokenizer.get_added_tokens_decoder().items()}
    kinds = [{True: 3, False: 4, None: 1}[added.get(number)] for number in range(len(words))]
    keys: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": END,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": template,
    }
    write_gguf(path, CONFIG | {"model_type": "llama"}, random_tensors(CONFIG), metadata=keys)
    return path

"""Train a small Llama-architecture language model, tokenizer included, from one text file.

    python models/train.py --text FILE --out DIR

The result is a Hugging Face folder (config, safetensors, tokenizer, model card) that `transformers` and this
repository's engine load unchanged. The last tenth of the text is held out; the weights saved are those with the lowest
loss on it. The defaults are the settings of the model that ships in models/shakespeare.

Needs torch, transformers, tokenizers, safetensors and numpy.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what torch asks for to be deterministic on CUDA
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from models.corpus import END_OF_TEXT, MIN_TEXT_BYTES, Corpus, crops, read_text, split_text, train_tokenizer

HEAD_DIM = 64
MAX_VOCAB = 65_536


def parse_flags(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse and check the command line; a value out of range exits with status 2 and names the flag and its limit."""
    parser = argparse.ArgumentParser(
        description="Train a small Llama-architecture language model from one text file, as a Hugging Face folder.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )

    def add(flag: str, default: float, low: float, high: float, help: str) -> None:
        kind = type(default)
        limits = f"{low:,} to {high:,}" if kind is int else f"{low:g} to {high:g}"

        def number(value: str) -> float:
            try:
                parsed = kind(value)
            except ValueError:
                raise argparse.ArgumentTypeError(
                    f"{value!r} is not {'a whole' if kind is int else 'a'} number"
                ) from None
            if not low <= parsed <= high:
                raise argparse.ArgumentTypeError(f"{value} is outside {limits}")
            return parsed

        parser.add_argument(flag, type=number, default=default, metavar="N", help=f"{help}; {limits}")

    parser.add_argument(
        "--text",
        type=Path,
        required=True,
        default=argparse.SUPPRESS,
        metavar="FILE",
        help=f"UTF-8 text to learn, at least {MIN_TEXT_BYTES} bytes",
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        default=argparse.SUPPRESS,
        metavar="DIR",
        help="folder to write; files of the same names are replaced",
    )
    parser.add_argument(
        "--title",
        default=argparse.SUPPRESS,
        metavar="WORDS",
        help="what the model card calls the text (default: the file's name)",
    )
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="cuda means ROCm on AMD GPUs")
    add("--seed", 1, 0, 2**31 - 1, "seed of everything random")
    add("--vocab-size", 1024, 257, MAX_VOCAB, "tokens: 256 bytes, the end of text and learned merges")
    add("--hidden", 256, 64, 8192, "width; a multiple of 64, the size of a head")
    add("--layers", 5, 1, 64, "decoder layers")
    add("--kv-heads", 2, 1, 128, "key/value heads; divides hidden / 64")
    add("--intermediate", 640, 64, 32768, "width of the feed-forward layer")
    add("--context", 1024, 64, 8192, "longest sequence in tokens; also the length of a training row")
    add("--batch", 16, 1, 1024, "rows per step")
    add("--steps", 1800, 1, 1_000_000, "optimizer steps; the learning rate falls to zero over them")
    add("--max-minutes", 60.0, 0.01, 100_000.0, "stop after this long and keep the best weights so far")
    add("--lr", 2e-3, 1e-6, 1.0, "highest learning rate")
    add("--warmup", 100, 0, 100_000, "steps over which the learning rate rises")
    add("--weight-decay", 2.0, 0.0, 10.0, "AdamW weight decay on matrices")
    add("--dropout", 0.2, 0.0, 0.9, "dropout on embeddings, attention and what each block adds")
    add("--bpe-dropout", 0.3, 0.0, 0.9, "share of merges skipped where a word is split at random")
    add("--bpe-dropout-until", 0.7, 0.0, 1.0, "part of training over which random splits fade out")
    add(
        "--ema",
        0.995,
        0.0,
        0.99999,
        "highest decay of the averaged weights, the ones validated and saved; it starts low",
    )
    add("--shortest", 200, 16, 8192, "shortest passage in tokens")
    add("--longest", 900, 16, 8192, "longest passage in tokens")
    add("--eval-every", 100, 1, 100_000, "steps between validations")
    add("--patience", 12, 1, 10_000, "validations without a better loss before training stops")
    flags = parser.parse_args(arguments)
    if flags.hidden % HEAD_DIM:
        parser.error(f"argument --hidden: {flags.hidden} is not a multiple of {HEAD_DIM}")
    if (flags.hidden // HEAD_DIM) % flags.kv_heads:
        parser.error(
            f"argument --kv-heads: {flags.kv_heads} does not divide the {flags.hidden // HEAD_DIM} query heads"
        )
    if flags.shortest > flags.longest:
        parser.error(f"argument --shortest: {flags.shortest} is more than --longest, {flags.longest}")
    if flags.out.exists() and not flags.out.is_dir():
        parser.error(f"argument --out: {flags.out} is not a folder")
    if flags.device == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: cuda asked for, but torch sees no GPU")
    return flags


def build_model(flags: argparse.Namespace, vocab_size: int, eos_id: int) -> LlamaForCausalLM:
    """A freshly initialised float32 Llama on the CPU, with tied embeddings."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=flags.hidden,
        intermediate_size=flags.intermediate,
        num_hidden_layers=flags.layers,
        num_attention_heads=flags.hidden // HEAD_DIM,
        num_key_value_heads=flags.kv_heads,
        head_dim=HEAD_DIM,
        max_position_embeddings=flags.context,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        bos_token_id=eos_id,
        eos_token_id=eos_id,
        pad_token_id=eos_id,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        # The padding id is the end of text: give it, like any token, a vector to start from.
        model.model.embed_tokens.padding_idx = None
        nn.init.normal_(model.model.embed_tokens.weight, std=0.02)
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.mul_(1 / math.sqrt(2 * flags.layers))
    return model


def add_dropout(model: LlamaForCausalLM, probability: float) -> None:
    """Drop embeddings, attention weights and the output of every block while the model is in training mode.

    Llama itself has dropout on attention weights only; hooks add the rest and leave nothing behind in what is saved.
    """

    def hook(module: nn.Module, _: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (F.dropout(output[0], probability, module.training), *output[1:])
        return F.dropout(output, probability, module.training)

    model.model.embed_tokens.register_forward_hook(hook)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = probability
        layer.self_attn.register_forward_hook(hook)
        layer.mlp.register_forward_hook(hook)


@torch.no_grad()
def validate(model: LlamaForCausalLM, tokens: Tensor, context: int) -> float:
    """Mean loss, in nats per token, of predicting tokens[1:] of one int64 sequence [n].

    Windows of `context` tokens overlap by half, and each token is predicted once, in the first window that reaches it:
    beyond the first window it has at least half a context before it.
    """
    total, scored, stride = 0.0, 1, max(1, context // 2)
    device = next(model.parameters()).device
    for start in range(0, len(tokens) - 1, stride):
        window = tokens[start : start + context + 1].to(device)
        first = scored - start - 1
        if first >= len(window) - 1:
            break
        logits = model(input_ids=window[None, :-1], use_cache=False).logits[0, first:].float()
        total += F.cross_entropy(logits, window[first + 1 :], reduction="sum").item()
        scored = start + len(window)
    return total / (len(tokens) - 1)


def learning_rate(step: int, flags: argparse.Namespace) -> float:
    """Linear warm-up, then a cosine down to zero at --steps."""
    if step < flags.warmup:
        return float(flags.lr) * (step + 1) / flags.warmup
    done = (step - flags.warmup) / max(1, flags.steps - flags.warmup)
    return float(flags.lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def train(
    flags: argparse.Namespace, corpus: Corpus, vocab_size: int, held_out: Tensor, bytes_per_token: float
) -> LlamaForCausalLM:
    """Train until --steps, --max-minutes or --patience ends it; return the averaged weights that validated best."""
    device = torch.device("cuda" if flags.device != "cpu" and torch.cuda.is_available() else "cpu")
    torch.manual_seed(flags.seed)
    # Off ROCm a second run writes the same bytes; there, attention may have no deterministic gradient and only warns.
    torch.use_deterministic_algorithms(True, warn_only=torch.version.hip is not None)
    torch.backends.cuda.enable_cudnn_sdp(False)
    model = build_model(flags, vocab_size, corpus.eos_id).to(device).train()
    averaged = build_model(flags, vocab_size, corpus.eos_id).to(device).eval()
    averaged.load_state_dict(model.state_dict())
    best = {name: weight.clone() for name, weight in averaged.state_dict().items()}
    add_dropout(model, flags.dropout)

    weights, averages = list(model.parameters()), list(averaged.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [w for w in weights if w.dim() > 1], "weight_decay": flags.weight_decay},
            {"params": [w for w in weights if w.dim() == 1], "weight_decay": 0.0},
        ],
        lr=flags.lr,
        betas=(0.9, 0.98),
        fused=device.type == "cuda",
    )
    rng = np.random.default_rng(flags.seed)
    started, step, best_loss, worse = time.monotonic(), 0, math.inf, 0
    stop = ""
    while not stop:
        fading = max(0.0, 1 - step / max(1e-9, flags.bpe_dropout_until * flags.steps))
        stream = corpus.stream(rng, flags.shortest, flags.longest, fading)
        for rows in crops(stream, rng, flags.batch, flags.context, corpus.eos_id):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, flags)
            batch = torch.from_numpy(rows).to(device)
            with torch.autocast(device.type, dtype=torch.bfloat16):
                logits = model(input_ids=batch[:, :-1], use_cache=False).logits
            loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            step += 1
            decay = min(flags.ema, step / (step + 10))
            with torch.no_grad():
                torch._foreach_lerp_(averages, weights, 1 - decay)

            out_of_time = time.monotonic() - started > flags.max_minutes * 60
            if step % flags.eval_every == 0 or step == flags.steps or out_of_time:
                validation = validate(averaged, held_out, flags.context)
                print(
                    f"step {step:5d}  train {loss.item():.4f}  validation {validation:.4f} nats/token"
                    f"  {validation / bytes_per_token:.4f} nats/byte  {time.monotonic() - started:.0f} s",
                    flush=True,
                )
                if validation < best_loss:
                    best_loss, worse = validation, 0
                    best = {name: weight.clone() for name, weight in averaged.state_dict().items()}
                else:
                    worse += 1
                if out_of_time:
                    stop = "--max-minutes"
                elif step == flags.steps:
                    stop = "--steps"
                elif worse >= flags.patience:
                    stop = "--patience"
                if stop:
                    print(f"stopped by {stop} at step {step}", flush=True)
                    break
    averaged.load_state_dict(best)
    return averaged


@torch.no_grad()
def sample(
    model: LlamaForCausalLM, tokenizer: Tokenizer, prompt: str, length: int, temperature: float, seed: int
) -> str:
    """`prompt` and up to `length` sampled tokens after it, as text; ends early at END_OF_TEXT."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    ids = tokenizer.encode(prompt).ids
    for _ in range(length):
        window = torch.tensor([ids[-model.config.max_position_embeddings :]], device=device)
        logits = model(input_ids=window, use_cache=False).logits[0, -1].float().cpu()
        token = int(torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator))
        if token == model.config.eos_token_id:
            break
        ids.append(token)
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Write the float16 model as a Hugging Face folder that old and new readers of its config understand."""
    out.mkdir(parents=True, exist_ok=True)
    model.config.dtype = torch.float16
    model.half().save_pretrained(out)
    end, context = model.config.eos_token_id, model.config.max_position_embeddings

    config = json.loads((out / "config.json").read_text())
    config |= {"rope_theta": 10000.0, "dtype": "float16", "torch_dtype": "float16"}
    write_json(out / "config.json", config)
    write_json(
        out / "generation_config.json",
        {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end, "do_sample": True, "temperature": 0.8},
    )
    tokenizer.save(str(out / "tokenizer.json"))
    write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": END_OF_TEXT,
            "eos_token": END_OF_TEXT,
            "pad_token": END_OF_TEXT,
            "add_bos_token": False,
            "add_eos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": context,
        },
    )


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write one indented JSON object."""
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


def command(arguments: Sequence[str]) -> str:
    """The command line as typed; of an absolute path only the name is told."""
    words = (Path(word).name if Path(word).is_absolute() else word for word in arguments)
    return shlex.join(["python", "models/train.py", *words])


def model_card(
    flags: argparse.Namespace,
    line: str,
    parameters: int,
    vocab_size: int,
    loss: float,
    held_out: str,
    bytes_per_token: float,
    samples: list[str],
) -> str:
    """The folder's README.md: what the model is, how good it is, where it comes from, how to make it again."""
    machine = torch.cuda.get_device_name() if flags.device != "cpu" and torch.cuda.is_available() else "the CPU"
    per_byte = loss / bytes_per_token
    per_character = per_byte * len(held_out.encode()) / len(held_out)
    shown = "\n\n".join("```text\n" + text.strip() + "\n```" for text in samples)
    title = getattr(flags, "title", flags.text.name)
    return f"""# A small language model of {title}

Llama architecture, {parameters:,} parameters in float16: {flags.layers} layers, hidden {flags.hidden}, feed-forward
{flags.intermediate}, {flags.hidden // HEAD_DIM} query and {flags.kv_heads} key/value heads of {HEAD_DIM},
tied embeddings, context {flags.context}. The tokenizer is a byte-level BPE of {vocab_size} tokens, trained on
the same text. `{END_OF_TEXT}` (id 0) begins and ends a passage and is never added to a prompt
automatically. The model imitates its text and knows nothing else. It gives a first run something to generate, and the
tests real weights to compare.

| measured on the last tenth of the text, which was not used for training | |
|---|---|
| loss | {loss:.4f} nats per token |
| | {per_byte:.4f} nats per byte |
| | {per_character / math.log(2):.4f} bits per character |
| bytes per token | {bytes_per_token:.3f} |

The loss is that of the saved float16 weights, computed in float32 over windows of {flags.context} tokens that overlap
by half. The same tenth determined when to stop and the script's settings, so the result is slightly optimistic.

The text is {title}. It is not in this folder.
The model was trained with torch {torch.__version__} on {machine} by

```sh
{line}
```

Samples at temperature 0.8, from the first held-out line after a blank line, and from the start of a passage:

{shown}
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, save, report; returns the process's exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    flags = parse_flags(words)
    try:
        text = read_text(flags.text)
        training, held_out = split_text(text)
        tokenizer = train_tokenizer(training, flags.vocab_size)
        corpus = Corpus(training, tokenizer, flags.bpe_dropout, flags.seed)
        if corpus.token_count <= flags.context:
            raise ValueError(
                f"--text: {corpus.token_count} tokens to train on are too few for --context {flags.context}; "
                f"give more text or a context of less than {corpus.token_count}"
            )
    except ValueError as error:
        print(f"train.py: error: {error}", file=sys.stderr)
        return 2

    ids = torch.tensor([corpus.eos_id, *tokenizer.encode(held_out).ids])
    bytes_per_token = len(held_out.encode()) / (len(ids) - 1)
    vocab_size = tokenizer.get_vocab_size()
    print(f"{corpus.token_count} tokens to train on, {len(ids) - 1} held out, vocabulary {vocab_size}", flush=True)

    model = train(flags, corpus, vocab_size, ids, bytes_per_token)
    save(model, tokenizer, flags.out)
    model = LlamaForCausalLM.from_pretrained(flags.out, dtype=torch.float32).to(model.device).eval()
    loss = validate(model, ids, flags.context)
    parameters = sum(weight.numel() for weight in model.parameters())
    opening = held_out.partition("\n\n")[2].partition("\n")[0]
    starts = [opening + "\n", END_OF_TEXT] if opening else [END_OF_TEXT]
    samples = [sample(model, tokenizer, start, 220, 0.8, flags.seed) for start in starts]
    card = model_card(flags, command(words), parameters, vocab_size, loss, held_out, bytes_per_token, samples)
    (flags.out / "README.md").write_text(card)
    size = sum(file.stat().st_size for file in flags.out.iterdir())
    print(f"{flags.out.name}: {parameters} parameters, {size} bytes")
    print(f"validation: {loss:.4f} nats/token, {loss / bytes_per_token:.4f} nats/byte")
    return 0


if __name__ == "__main__":
    sys.exit(main())

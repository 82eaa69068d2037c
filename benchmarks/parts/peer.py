"""The same requests through the continuous batching of ``transformers``, with the same weights and memory budget."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from benchmarks.parts.stand import PAGE_SIZE, Stand
from benchmarks.parts.workload import Job
from services.engine.checkpoint.config import ModelConfig
from services.engine.model.batch import Row
from services.engine.model.decoder import Model

#: Tokens per page of transformers, and per step.
BLOCK, STEP_TOKENS = 64, 2048


def _tensor(array: Any) -> Any:
    """A bfloat16 tensor that views a uint16 array on the device."""
    import numpy as np
    import torch

    return torch.from_dlpack(array.view(np.int16)).view(torch.bfloat16)


def state_of(model: Model) -> dict[str, Any]:
    """The weights under their Hugging Face names: views of ours."""
    config = model.config
    embedding = _tensor(model._embedding)
    state = {"model.embed_tokens.weight": embedding, "model.norm.weight": _tensor(model._norm)}
    state["lm_head.weight"] = embedding if config.tied_embeddings else _tensor(model._head)
    queries, keys = config.query_heads * config.head_dim, config.kv_heads * config.head_dim
    for number, layer in enumerate(model._layers):
        at = f"model.layers.{number}."
        qkv, gate_up = _tensor(layer.qkv), _tensor(layer.gate_up)
        state |= {
            f"{at}input_layernorm.weight": _tensor(layer.attention_norm),
            f"{at}self_attn.q_proj.weight": qkv[:queries],
            f"{at}self_attn.k_proj.weight": qkv[queries : queries + keys],
            f"{at}self_attn.v_proj.weight": qkv[queries + keys :],
            f"{at}self_attn.o_proj.weight": _tensor(layer.output),
            f"{at}post_attention_layernorm.weight": _tensor(layer.mlp_norm),
            f"{at}mlp.gate_proj.weight": gate_up[: config.intermediate_size],
            f"{at}mlp.up_proj.weight": gate_up[config.intermediate_size :],
            f"{at}mlp.down_proj.weight": _tensor(layer.down),
        }
        if layer.qk_norms is not None:
            state[f"{at}self_attn.q_norm.weight"] = _tensor(layer.qk_norms[0])
            state[f"{at}self_attn.k_norm.weight"] = _tensor(layer.qk_norms[1])
    return state


def adopted(model: Model) -> Any:
    """transformers' model on our weights."""
    import torch
    import transformers

    config = _config_of(model.config, transformers)
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    theirs.load_state_dict(state_of(model), strict=True, assign=True)
    theirs.tie_weights()
    # The frequencies are in no checkpoint, and were created on the meta device.
    theirs.model.rotary_emb = type(theirs.model.rotary_emb)(config).to("cuda")
    theirs.eval()
    return theirs


def _config_of(config: ModelConfig, transformers: Any) -> Any:
    kinds = {"LlamaForCausalLM": transformers.LlamaConfig, "Qwen3ForCausalLM": transformers.Qwen3Config}
    return kinds[config.architecture](
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.query_heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        max_position_embeddings=config.max_context,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        rms_norm_eps=config.rms_norm_eps,
        tie_word_embeddings=config.tied_embeddings,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )


def agreement(stand: Stand, theirs: Any, prompts: Sequence[Sequence[int]]) -> str:
    """Describe the difference between both sides' logits. Raises RuntimeError if it exceeds rounding."""
    import torch

    rows = [(list(prompt), -(-len(prompt) // PAGE_SIZE)) for prompt in prompts]
    least = 1.0
    with stand.local(max(pages for _, pages in rows)) as pages:
        memory = pages.memory()
        for prompt, count in rows:
            ours = stand.model.forward([Row(prompt, 0, range(count), True)], memory)
            stand.backend.finish()
            with torch.no_grad():
                logits = theirs(torch.tensor([prompt], device="cuda")).logits[0, -1].float()
            both = torch.stack([torch.from_dlpack(ours)[0], logits])
            least = min(least, float(torch.corrcoef(both)[0, 1]))
        del memory
    if least < 0.98:
        raise RuntimeError(f"the logits of transformers correlate with ours by {least:.4f}: not the same weights")
    return f"logits correlate by {least:.4f}"


def generate(theirs: Any, jobs: Sequence[Job], limit_s: float) -> tuple[int, float]:
    """Run the jobs greedily. Returns the tokens of those that ended, and the seconds since all were submitted.

    Gives up on the others after ``limit_s`` seconds.
    """
    import torch
    from transformers import GenerationConfig
    from transformers.generation import ContinuousBatchingConfig

    longest = max(job.tokens for job in jobs)
    generation = GenerationConfig(max_new_tokens=longest, do_sample=False, eos_token_id=-1, pad_token_id=0)
    # Its defaults fill the remaining memory with a mask of all possible keys.
    blocks = sum(-(-(len(job.prompt) + job.tokens) // BLOCK) + 1 for job in jobs)
    batching = ContinuousBatchingConfig(
        block_size=BLOCK,
        num_blocks=blocks,
        max_batch_tokens=STEP_TOKENS,
        allow_block_sharing=False,
        max_requests_per_batch=len(jobs),
    )
    tokens = 0
    with (
        torch.no_grad(),
        theirs.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=batching, block=True, timeout=5
        ) as manager,
    ):
        began = time.perf_counter()
        for number, job in enumerate(jobs):
            manager.add_request(list(job.prompt), request_id=f"r{number}", max_new_tokens=job.tokens, eos_token_id=-1)
        ended = 0
        while ended < len(jobs) and time.perf_counter() - began < limit_s:
            result = manager.get_result(timeout=1)
            if result is None:
                if not manager.is_running():
                    raise RuntimeError("transformers ended early")
                continue
            if result.is_finished():
                if result.error is not None:
                    raise RuntimeError(f"transformers: {result.error}")
                ended += 1
                tokens += len(result.generated_tokens)
        took = time.perf_counter() - began
        if ended < len(jobs):
            manager.stop(block=True, timeout=10, hard_stop=True)
    return tokens, took


def release() -> None:
    """Free the memory that torch caches."""
    import gc

    import torch

    gc.collect()
    torch.cuda.empty_cache()

# mypy: disable-error-code="attr-defined"
"""Conversations, and the templates that write them; what `transformers` makes of each is in expected.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>"}
#: All that the templates write, and some that are not special.
SPECIAL_TOKENS = [
    *("<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("[INST]", "[/INST]"),
]
ADDED_TOKENS = ["<think>", "</think>", "<tool_response>", "</tool_response>"]


def said(*turns: str) -> list[dict[str, Any]]:
    """Messages, of the user and of the assistant in turns."""
    return [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(turns)]


TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather <b>here</b> & now, in °C",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}, "days": {"maximum": 7}}},
    },
}
CALLED: list[dict[str, Any]] = [
    {"role": "user", "content": "Rain?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"place": "Zürich"}}}],
    },
    {"role": "tool", "content": '{"rain": true}'},
]
SYSTEM: dict[str, Any] = {"role": "system", "content": "  Be brief. "}
THOUGHT = said("1+1?", "<think>\nWell.\n</think>\n\n2", "And 2+2?")

#: name -> template, messages, and the other arguments of apply_chat_template.
CASES: dict[str, tuple[str, list[dict[str, Any]], dict[str, Any]]] = {
    f"{template} {name}": (template, messages, arguments)
    for template, cases in {
        "chatml": {
            "a question": (said("Hi!"), {"add_generation_prompt": True}),
            "no question": (said("Hi!"), {}),
            "with a system": ([SYSTEM, *said("Hi!", "Hello.", "日本語 🙂\n\n")], {"add_generation_prompt": True}),
            "with tools": ([SYSTEM, *CALLED], {"add_generation_prompt": True, "tools": [TOOL, TOOL]}),
            "to go on with": (said("Hi!", "Well, "), {"continue_final_message": True}),
            "the same to go on with": (said("the", "the"), {"continue_final_message": True}),
        },
        "llama3": {
            "a question": (said(" Hi! "), {"add_generation_prompt": True, "date_string": "26 Jul 2024"}),
            "with a system": ([SYSTEM, *said("Hi!", "Hello.", "?")], {"date_string": "x"}),
            "with a call": (CALLED, {"add_generation_prompt": True, "date_string": "x"}),
            "trimmed to go on with": (said("Hi!", " Well, "), {"continue_final_message": True, "date_string": "x"}),
        },
        "mistral": {
            "a question": (said("Hi!"), {"add_generation_prompt": True}),
            "with a system": ([SYSTEM, *said("Hi!", "Hello.", "?")], {}),
            "to go on with": (said("Hi!", "Well,"), {"continue_final_message": True}),
        },
        "qwen3": {
            "a question": (said("Hi!"), {"add_generation_prompt": True}),
            "without thinking": ([SYSTEM, *said("Hi!")], {"add_generation_prompt": True, "enable_thinking": False}),
            "with thinking": (THOUGHT, {"add_generation_prompt": True, "enable_thinking": True}),
            "after a call": ([*said("Rain?", "So:"), CALLED[2]], {"add_generation_prompt": True}),
            "to go on with": (said("Hi!", "<think>\nHm"), {"continue_final_message": True}),
        },
        "filters": {
            "without tools": ([SYSTEM, *said("Hi!", "Hello.", " the! ")], {"add_generation_prompt": True}),
            "with tools": (CALLED, {"tools": [TOOL]}),
        },
        "blocks": {
            "a question": ([{"role": "note", "content": "!"}, *said("Hi!\n\n")], {"add_generation_prompt": True}),
            "a break": (said("Hi!", "ü", "stop", "no"), {}),
        },
    }.items()
    for name, (messages, arguments) in cases.items()
}


def template_of(name: str) -> str:
    """The text of a template."""
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")

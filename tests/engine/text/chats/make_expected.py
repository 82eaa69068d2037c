"""Write what `transformers` makes of the conversations, for `services.engine.text.chat` to be compared with.

    python -m tests.engine.text.chats.make_expected tests/engine/text/chats/expected.json

Case -> its text and its token ids, by a tokenizer of `vocabulary.py`. Needs transformers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import transformers
from transformers import PreTrainedTokenizerFast

from tests.engine.text.chats.conversations import CASES, SPECIAL, template_of
from tests.engine.text.chats.vocabulary import tokenizer


def main() -> None:
    """Write the file."""
    made = {}
    known = PreTrainedTokenizerFast(tokenizer_object=tokenizer(), **SPECIAL)
    for name, (template, messages, arguments) in CASES.items():
        known.chat_template = template_of(template)
        text = known.apply_chat_template(messages, tokenize=False, **arguments)
        ids = known.apply_chat_template(messages, tokenize=True, return_dict=False, **arguments)
        made[name] = {"text": text, "token_ids": ids}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(case, ensure_ascii=False)}" for name, case in made.items())
    Path(sys.argv[1]).write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    print(f"transformers {transformers.__version__}, {len(made)} cases")


if __name__ == "__main__":
    main()

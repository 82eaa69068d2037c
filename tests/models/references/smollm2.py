"""The prompts for SmolLM2-135M-Instruct, the trained model that ``make smollm2`` fetches, and for its references."""

from __future__ import annotations

import random
from pathlib import Path

from scripts.smollm2 import FOLDER, NAME

MODEL = FOLDER / NAME
REFERENCES = Path(__file__).with_name("smollm2.json")
LOGPROBS = Path(__file__).with_name("smollm2.npz")
_LICENSE = Path(__file__).parents[3].joinpath("LICENSE").read_text(encoding="utf-8")

#: Tokens of an answer at most, and of one to the longest prompt, where each costs more.
GREEDY_TOKENS, FEWER_TOKENS = 64, 24

#: Texts that tokenizers are known to differ about: digits of all kinds, spaces of all kinds, scripts, code.
TEXTS = [
    "The capital of France is Paris.",
    "1234567890 12 345 6.75 1,000,000 2024-11-21 0x1F3 v3.11.2 $99.99",
    "x1 x12 x 123 a1b2c3 12th 3rd 1st ' 7' 1's",
    "½ ¾ ² ³ Ⅷ ⅻ 〇 ٣٤٥ १२३ ๔๕ １２３ 𝟘𝟙 ①②",
    "He'll say I'M sure they've, we'd, IT'S don't DON'T ’s 's 'tis",
    "  leading, trailing  \t tabs\t\tand \n\n newlines \r\n\r\n  mixed \n ",
    "a\u00a0b\u2003c\u3000d\u200be\u2028f\x0bg\x0ch\x85i",
    "naïve café e\u0301 Ångström A\u030a ﬁ ﬀ ß ẞ İ ı ǅ",
    "日本語のテキスト、東京２０２５年。한국어 텍스트 中文文本！",
    "Россия и Україна, Ελλάδα, עברית, العربية ١٢٣, हिन्दी में, ภาษาไทย, தமிழ்",
    "👍🏽 👩‍👩‍👧‍👦 🇫🇷🇩🇪 ❤️ ☃ \U0001f9ff",
    "def f(x: int = 0x10) -> str:\n    return f\"{x:>08b}\" if x != 1e-3 else '''no'''\n\n\n# done\n",
    '{"key": [1, 2.5, -3e10, null], "ünï": "\\u00e9\\n"}\n<a href="https://example.org/?q=1&r=2#x">y</a>',
    "SELECT * FROM t WHERE a<>b AND c>=10; -- ok\n\tint main(){ return i++ + ++j; }",
    "!!!??...---===~~~ (parens) [brackets] {braces} <angle> ``` `code` @user #tag %20 ^ & * _ + | \\ /",
    "\x00\x01\x7f\x80\ufffd\ufeff\ue000",
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|><repo_name>x<empty_output>",
    "supercalifragilisticexpialidocious antidisestablishmentarianism aaaaaaaaaaaaaaaaaaaaaaaa",
    " ",
    "",
]
_ALPHABET = "aeiou tnsr ETO '’sdlm 0123456789 \n\t\r\u00a0.,!?-_/()[]{}<>|=+*éßñ中日の가Жя१½²Ⅷ🙂\u0301\u200d"


def random_texts(count: int = 60) -> list[str]:
    """Short texts of anything, always the same."""
    chosen = random.Random(20)
    return ["".join(chosen.choices(_ALPHABET, k=chosen.randrange(1, 60))) for _ in range(count)]


def _asked(question: str, system: str | None = None) -> list[dict[str, str]]:
    first = [{"role": "system", "content": system}] if system is not None else []
    return [*first, {"role": "user", "content": question}]


#: Name -> messages. The last one is longer than 1024 tokens, two steps.
CHATS: dict[str, list[dict[str, str]]] = {
    "capital": _asked("What is the capital of France?"),
    "capitals": [
        *_asked("What is the capital of France?"),
        {"role": "assistant", "content": "The capital of France is Paris."},
        {"role": "user", "content": "And of Italy?"},
    ],
    "count": _asked("Count from 1 to 10."),
    "pirate": _asked("Who are you?", "You are a pirate."),
    "license": _asked(f"What is this text?\n\n{_LICENSE[:5600]}"),
}
MOST_TOKENS = {name: FEWER_TOKENS if name == "license" else GREEDY_TOKENS for name in CHATS}
#: A text for log-probabilities: longer than a step.
EXCERPT = _LICENSE[:3300]

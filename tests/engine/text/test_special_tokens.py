"""Special tokens written by a template, and those typed by a user."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.engine.text.special_tokens import GUARD, SpecialTokens
from services.engine.text.tokenizer import Tokenizer
from tests.engine.text.chats import vocabulary
from tests.engine.text.chats.conversations import ADDED_TOKENS, SPECIAL_TOKENS

BYTES = Tokenizer(vocabulary.tokenizer(), 400)
PIECES = Tokenizer(vocabulary.pieces(), 400)
SPECIAL = {name: SpecialTokens(tokenizer) for name, tokenizer in (("bytes", BYTES), ("pieces", PIECES))}
TOKENIZERS = {"bytes": BYTES, "pieces": PIECES}
IDS = range(len(SPECIAL_TOKENS))

typed = st.lists(st.sampled_from([*SPECIAL_TOKENS, *ADDED_TOKENS, "<", "|", ">", "s", "im", "_end", " ", "the", "日"]))
typed_texts = typed.map("".join)


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=200, deadline=None)
@given(text=typed_texts)
def test_what_is_typed_is_text(kind: str, text: str) -> None:
    special, tokenizer = SPECIAL[kind], TOKENIZERS[kind]
    guarded = special.guard(text)
    assert special.plain(guarded) == text
    assert not any(token in guarded for token in SPECIAL_TOKENS)
    ids = special.encode(guarded)
    assert not set(ids) & set(IDS)
    assert tokenizer.decode(ids, keep_special=True).removeprefix(" ") == text.removeprefix(" ")


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=200, deadline=None)
@given(parts=st.lists(st.sampled_from(["<s>", "<|im_start|>", "<|im_end|>", " a", "b", "  ", "<think>", "[/INST]"])))
def test_what_is_written_is_what_the_tokenizer_makes_of_it(kind: str, parts: list[str]) -> None:
    """Beside something typed, too: the rest has the tokens that it has without."""
    special, text = SPECIAL[kind], "".join(parts)
    alone = TOKENIZERS[kind].inner.encode(text, add_special_tokens=False).ids
    assert special.encode(text) == alone
    guarded = special.guard("<s>")
    spelled = special.encode(f"x{guarded}x")
    both = special.encode(f"x{guarded}x</s>{text}")
    after = TOKENIZERS[kind].inner.encode(f"x</s>{text}", add_special_tokens=False).ids
    end = SPECIAL_TOKENS.index("</s>")
    assert both[: both.index(end)] == spelled and both[both.index(end) :] == after[after.index(end) :]


def test_nobody_ends_his_turn_by_typing() -> None:
    special = SPECIAL["bytes"]
    text = f"<|im_start|>user\n{special.guard('Hi<|im_end|>')}<|im_end|>"
    ids = special.encode(text)
    assert [token for token in ids if token in IDS] == [3, 4] and ids[-1] == 4
    assert special.plain(text) == "<|im_start|>user\nHi<|im_end|><|im_end|>"
    assert BYTES.decode(ids, keep_special=True) == special.plain(text)


def test_spaces_that_a_special_token_takes_are_taken_beside_a_guard_too() -> None:
    special = SPECIAL["bytes"]
    assert special.encode(f"[/INST]  {special.guard('<s>')}") == [9, *special.encode(special.guard("<s>"))]


def test_trimming_and_case_leave_the_guard() -> None:
    special = SPECIAL["bytes"]
    for change in (str.strip, str.upper, lambda text: text[:-1], lambda text: text.split("\n")[0]):
        text = change(special.guard(" <|im_end|> \n"))
        assert not set(special.encode(f"{text}</s>")[:-1]) & set(IDS)


def test_a_special_token_of_one_character_and_one_within_another() -> None:
    inner = vocabulary.tokenizer()
    inner.add_special_tokens(["日", "<s>>", "s>"])
    special = SpecialTokens(Tokenizer(inner, 400))
    ids = range(len(SPECIAL_TOKENS)), {inner.token_to_id(token) for token in ("日", "<s>>", "s>")}
    for text in ("日", "a日b", "<s>>", "<s>>日", "日日<s>", "s>s>"):
        found = special.encode(f"{special.guard(text)}<s>日")
        assert found[-2:] == [0, inner.token_to_id("日")]
        assert not any(set(found[:-2]) & set(some) for some in ids)
        assert special.plain(special.guard(text)) == text


def test_a_tokenizer_without_special_tokens() -> None:
    inner = vocabulary.tokenizer()
    plain = type(inner)(inner.model)
    plain.pre_tokenizer = inner.pre_tokenizer
    special = SpecialTokens(Tokenizer(plain, 400))
    assert special.guard("<s>") == "<s>" and special.encode("the") == plain.encode("the").ids


def test_the_guard_is_no_character() -> None:
    assert GUARD == "\ufdd1"

"""SentencePiece's tokenizers out of GGUF files: the tokens and the text that its own library makes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from rocmforge.engine.v1 import engine_pb2 as pb
from services.common.errors import ModelInvalid
from services.engine.checkpoint.fields import Fields
from services.engine.checkpoint.gguf.sentencepiece import MOST_ALTOGETHER, MOST_CHARACTERS, MOST_SYMBOLS, pieces
from services.engine.model.checkpoint import Checkpoint
from services.engine.text.special_tokens import SpecialTokens
from services.engine.text.tokenizer import TextStream, Tokenizer
from tests.engine.checkpoint.gguf.sentencepieces import (
    BYTE,
    BYTES,
    CONTROL,
    NORMAL,
    UNUSED,
    USER_DEFINED,
    WORDS,
    composed,
    metadata_of,
    trained,
)
from tests.engine.text.test_tokenizer import cut
from tests.models.families import FAMILIES, family_tensors
from tests.models.gguf_files import write_gguf

SYMBOLS = ["<sep>", "7", "77", "▁▁", "\n", "th"]
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no prefix": {"add_dummy_prefix": False},
    "digits": {"split_digits": True},
    "stripped": {"remove_extra_whitespaces": True},
    "stripped, no prefix": {"remove_extra_whitespaces": True, "add_dummy_prefix": False},
    "symbols": {"user_defined_symbols": SYMBOLS},
    "symbols, no prefix": {"user_defined_symbols": SYMBOLS, "add_dummy_prefix": False},
    "symbols, stripped": {"user_defined_symbols": SYMBOLS, "remove_extra_whitespaces": True},
    "phrases": {"split_by_whitespace": False, "split_by_unicode_script": False, "max_sentencepiece_length": 48},
    "few characters": {"character_coverage": 0.98},
    "no bytes": {"byte_fallback": False, "character_coverage": 0.98},
    "no bytes, symbols": {"byte_fallback": False, "user_defined_symbols": SYMBOLS},
}


def built(keys: dict[str, Any], **changes: Any) -> Tokenizer:
    """Of these keys with some changed, their names less tokenizer.ggml.; None leaves one out."""
    changed = keys | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    present = {key: value for key, value in changed.items() if value is not None}
    return Tokenizer(pieces(Fields(Path("it.gguf"), present)), len(keys["tokenizer.ggml.tokens"]))


@pytest.fixture(scope="module", params=MODELS)
def both(request: pytest.FixtureRequest) -> tuple[sentencepiece.SentencePieceProcessor, Tokenizer, dict[str, Any]]:
    """The model as its library reads it, and as it is built from a file."""
    theirs = trained(**MODELS[request.param])
    return theirs, built(metadata_of(theirs), add_bos_token=False), MODELS[request.param]


ODD = [
    "<sep>",
    "7",
    "77",
    "<",
    "sep>",
    "\u200d",
    "\u0301",
    "\ufeff",
    "é",
    "🙃",
    "語日",
    "\x00",
    "\x1f",
    "\r\n",
    "\t",
    "[/",
]
words = st.sampled_from([*WORDS, *ODD, " ", " ", "  ", "\n", "▁", "▁▁", "<0x41>", "<0x0A>"])
any_text = st.text(max_size=30) | st.lists(words, max_size=12).map("".join) | st.lists(words, max_size=8).map(" ".join)


@settings(max_examples=250, deadline=None)
@given(text=any_text)
@example("")
@example(" ")
@example("   leading and trailing   ")
@example("a\0b")
@example("7")
def test_every_text_has_the_same_tokens(both: Any, text: str) -> None:
    theirs, ours, options = both
    # In a text these are tokens; to SentencePiece they are text.
    assume(not any(token in text for token in ("<unk>", "<s>", "</s>")))
    ids = theirs.encode(text)
    assert ours.encode(text) == ids
    if theirs.unk_id() in ids:
        return  # what is unknown is no text, where SentencePiece writes a sign for it
    if options.get("remove_extra_whitespaces") and "▁" in text:
        return  # that is not a space yet when spaces are taken away
    assert ours.decode(ids) == theirs.decode(ids)
    if not options.get("remove_extra_whitespaces"):
        assert ours.decode(ids) == text.replace("▁", " ")


def streamed(tokenizer: Tokenizer, ids: list[int]) -> str:
    stream = TextStream(tokenizer, [], False)
    return "".join([*map(stream.push, ids), stream.finish()])


@settings(max_examples=150, deadline=None)
@given(text=any_text, begin=st.integers(0, 8))
@example(" 日本", 0)
@example("  a", 1)
def test_the_pieces_of_a_stream_are_the_text(both: Any, text: str, begin: int) -> None:
    """From any token on: an answer may begin with a space, or within a character."""
    _, ours, _ = both
    ids = ours.encode(text)[begin:]
    whole = ours.decode(ids)
    assert streamed(ours, ids) == whole or "\ufffd" in whole


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_tokens_that_no_text_has_are_decoded_and_streamed(both: Any, data: st.DataObject) -> None:
    theirs, ours, options = both
    ids = data.draw(st.lists(st.integers(0, theirs.get_piece_size() - 1), max_size=12))
    whole = ours.decode(ids)
    # A space that is a byte is no space before a text, but in Llama 2's tokenizer.json it is taken for one.
    assume(theirs.piece_to_id("<0x20>") not in ids)
    if "\ufffd" in whole or theirs.unk_id() in ids or options.get("remove_extra_whitespaces"):
        return
    # A control token is no text, so it is not between two bytes of a character either.
    assert whole == theirs.decode([token for token in ids if not theirs.is_control(token)])
    assert streamed(ours, ids) == whole


@settings(max_examples=150, deadline=None)
@given(
    text=any_text,
    stop=st.lists(st.sampled_from(["at", " the", "🙂", "本", "her", "r w", "\n"]), min_size=1, max_size=3),
)
@example("the theatre on a mat, 🙂🙂 日本語", ["e on", "🙂🙂"])
def test_a_stop_string_may_lie_in_several_tokens(both: Any, text: str, stop: list[str]) -> None:
    _, ours, _ = both
    ids = ours.encode(text)
    stream = TextStream(ours, stop, False)
    found = ""
    for token in ids:
        found += stream.push(token)
        if stream.stopped is not None:
            break
    assert (found + stream.finish(), stream.stopped) == cut(ours.decode(ids), stop, False)


ab = st.text("ab▁", min_size=1, max_size=5)


@settings(max_examples=400, deadline=None)
@given(
    vocabulary=st.dictionaries(ab, st.integers(-9, -1) | st.floats(-50, -1, width=32), max_size=14),
    symbols=st.sets(ab, max_size=2),
    prefix=st.booleans(),
    texts=st.lists(st.text("ab ▁é", max_size=14), min_size=8, max_size=8),
)
def test_every_vocabulary_that_is_taken_says_what_sentencepiece_says(
    vocabulary: dict[str, float], symbols: set[str], prefix: bool, texts: list[str]
) -> None:
    """Scores in any order, pieces that nothing merges to, letters that are none."""
    whole = [(text, 0.0, USER_DEFINED) for text in sorted(symbols)]
    rest = [(text, score, NORMAL) for text, score in vocabulary.items() if text not in symbols]
    theirs = composed([*BYTES, *whole, *rest], prefix=prefix)
    try:
        ours = built(metadata_of(theirs), add_bos_token=False)
    except ModelInvalid as error:
        same_score = len({score for _, score, _ in rest}) < len(rest)
        letter_missing = not set("ab▁") <= vocabulary.keys() | symbols
        assert ("the same score" in error.message and same_score) or ("is missing" in error.message and letter_missing)
        return
    for text in [*texts, *vocabulary, *symbols]:
        assert ours.encode(text) == theirs.encode(text), text


# --- special tokens --------------------------------------------------------------------------------------------------

PLAIN = trained()
KEYS = metadata_of(PLAIN)
TURNS = ["<|im_start|>", "<|im_end|>"]


def with_tokens(keys: dict[str, Any], added: list[str], kind: int, score: float = -1000.0) -> dict[str, Any]:
    """More tokens, as a converter adds them."""
    lists = {"tokens": added, "scores": [score] * len(added), "token_type": [kind] * len(added)}
    return keys | {f"tokenizer.ggml.{name}": keys[f"tokenizer.ggml.{name}"] + more for name, more in lists.items()}


def test_a_text_after_a_special_token_begins_like_any_other() -> None:
    ours = built(KEYS)
    assert ours.encode("<s>the cat</s> sat<unk>") == [
        *[1, 1, *PLAIN.encode("the cat"), 2],
        *[*PLAIN.encode(" sat"), 0],
    ]
    assert ours.decode(ours.encode("<s>the cat</s>")) == "the cat"
    assert ours.decode([1, *PLAIN.encode("the"), 2], keep_special=True) == "<s> the</s>"


@pytest.mark.parametrize("kind", [CONTROL, USER_DEFINED])
def test_tokens_that_were_added_to_the_model(kind: int) -> None:
    ours = built(with_tokens(KEYS, TURNS, kind), add_bos_token=False)
    start = PLAIN.get_piece_size()
    text = "<|im_start|>the\nhat<|im_end|>\n"
    assert ours.encode(text) == [start, *PLAIN.encode("the\nhat"), start + 1, *PLAIN.encode("\n")]
    # The end of a turn is never text, whatever its type is.
    kept = "" if kind == CONTROL else "<|im_start|>"
    assert ours.decode(ours.encode(text)).replace(" ", "") == f"{kept}the\nhat\n"


def _typed(options: str) -> tuple[sentencepiece.SentencePieceProcessor, SpecialTokens]:
    theirs = trained(**MODELS[options])
    return theirs, SpecialTokens(built(with_tokens(metadata_of(theirs), TURNS, CONTROL)))


TYPED = {options: _typed(options) for options in ("plain", "no prefix", "symbols", "symbols, no prefix")}


@pytest.mark.parametrize("options", TYPED)
@settings(max_examples=150, deadline=None)
@given(typed=st.lists(st.sampled_from(["<s>", "</s>", "<|im_end|>", "<0x41>", "7", "the", " ", "é"]), max_size=5))
@example(typed=["</s>"])
def test_special_tokens_that_are_typed_are_text(options: str, typed: list[str]) -> None:
    theirs, special = TYPED[options]
    text = "".join(typed)
    start = theirs.get_piece_size()
    guarded = special.guard(text)
    assert special.encode(f"<|im_start|>{guarded}<|im_end|>") == [start, *theirs.encode(text), start + 1]


@pytest.mark.parametrize(
    ("changes", "before", "after"),
    [
        ({}, [1], []),
        ({"add_bos_token": None, "bos_token_id": None}, [1], []),
        ({"add_bos_token": False, "add_eos_token": True}, [], [2]),
        ({"add_eos_token": True, "eos_token_id": None}, [1], [2]),
        ({"bos_token_id": 300, "add_eos_token": True}, [300], [2]),
        ({"add_bos_token": None, "add_space_prefix": None, "remove_extra_whitespaces": None}, [1], []),
    ],
)
def test_what_a_text_begins_and_ends_with(changes: dict[str, Any], before: list[int], after: list[int]) -> None:
    assert built(KEYS, **changes).encode("the cat") == [*before, *PLAIN.encode("the cat"), *after]


@pytest.mark.parametrize("name", ["$A", "a:b", "two words", "%"])
def test_a_text_may_begin_with_any_token(name: str) -> None:
    keys = with_tokens(KEYS, [name], CONTROL)
    begin = PLAIN.get_piece_size()
    assert built(keys, bos_token_id=begin).encode("the") == [begin, *PLAIN.encode("the")]


# --- files -----------------------------------------------------------------------------------------------------------

CONFIG = FAMILIES["llama2"] | {"vocab_size": PLAIN.get_piece_size() + 4, "num_hidden_layers": 1}
TENSORS = family_tensors(CONFIG, 0)


def opened(folder: Path, keys: dict[str, Any]) -> Checkpoint:
    write_gguf(folder / "it.gguf", CONFIG, TENSORS, metadata=keys)
    return Checkpoint.open(folder / "it.gguf")


def test_through_a_file(tmp_path: Path) -> None:
    checkpoint = opened(tmp_path, KEYS)
    tokenizer = checkpoint.tokenizer()
    text = " the cat  sat on 日本 🙃\n"
    assert tokenizer.encode(text) == [1, *PLAIN.encode(text)]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (checkpoint.config.bos_token_id, checkpoint.config.eos_token_ids) == (1, (2,))


START = PLAIN.get_piece_size()


@pytest.mark.parametrize(
    ("tokens", "kind", "changes", "ends"),
    [
        ([], CONTROL, {"eos_token_id": None, "bos_token_id": None}, (2,)),
        (TURNS, CONTROL, {}, (2, START + 1)),
        (TURNS, USER_DEFINED, {}, (2, START + 1)),
        (TURNS, USER_DEFINED, {"eos_token_id": START + 1}, (START + 1, 2)),  # the second one by its name, </s>
        (TURNS, NORMAL, {}, (2,)),
        (TURNS, CONTROL, {"eot_token_id": START}, (2, START)),
        (["<end_of_turn>"], CONTROL, {}, (2, START)),
        (["<|im_end|>", "<|eot_id|>"], CONTROL, {}, (2, START + 1)),
    ],
)
def test_what_an_answer_ends_with(
    tmp_path: Path, tokens: list[str], kind: int, changes: dict[str, Any], ends: tuple[int, ...]
) -> None:
    keys = with_tokens(KEYS, tokens, kind)
    checkpoint = opened(tmp_path, keys | {f"tokenizer.ggml.{name}": value for name, value in changes.items()})
    assert checkpoint.config.eos_token_ids == ends
    assert checkpoint.config.bos_token_id == 1


CHATML = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("kind", [CONTROL, USER_DEFINED])
def test_a_chat_is_written_with_its_tokens_and_nobody_types_them(tmp_path: Path, kind: int) -> None:
    keys = with_tokens(KEYS, TURNS, kind) | {"tokenizer.chat_template": CHATML}
    checkpoint = opened(tmp_path, keys)
    tokenizer = checkpoint.tokenizer()
    turn = pb.Message(role="user", content="the hat<|im_end|></s> 日本")
    prompt = asyncio.run(checkpoint.chat(tokenizer).read(pb.Messages(items=[turn]), 10_000))
    end = START + 1
    typed = [*PLAIN.encode("user\nthe hat<|im_end|></s> 日本")]
    answer = [START, *PLAIN.encode("assistant\n")]
    assert list(prompt.token_ids) == [1, START, *typed, end, *PLAIN.encode("\n"), *answer]
    assert set(checkpoint.config.eos_token_ids) == {2, end}


# --- what is refused -------------------------------------------------------------------------------------------------

COUNT = len(KEYS["tokenizer.ggml.tokens"])
Change = Callable[[list[Any]], list[Any]]


def replaced(at: int, value: Any) -> Change:
    return lambda values: [*values[:at], value, *values[at + 1 :]]


def added(text: str, kind: int = NORMAL, score: float = -5000.5) -> dict[str, Any]:
    return {
        name: lambda values, more=more: [*values, more] for name, more in zip(LISTS, (text, score, kind), strict=True)
    }


LISTS = ("tokens", "scores", "token_type")
LETTER = PLAIN.piece_to_id("t")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"scores": None}, f"scores is missing: it must be a list with one entry per token, {COUNT}"),
        ({"scores": lambda values: values[1:]}, f"scores is .*: it must be a list with one entry per token, {COUNT}"),
        ({"scores": replaced(300, float("nan"))}, "scores is .*: entry 300 is nan; it must be a finite number"),
        ({"scores": replaced(9, float("-inf"))}, "entry 9 is -inf; it must be a finite number"),
        ({"scores": replaced(9, 4)}, "entry 9 is 4; it must be a finite number"),
        (
            {"scores": lambda values: [-1000.0] * COUNT},
            "the same score, -1000, .*put the model's tokenizer.json next to",
        ),
        ({"tokens": None}, "tokens is missing: it must be a list of strings"),
        ({"tokens": replaced(300, "<0x41>")}, "tokens is .*: there is a duplicate token: '<0x41>'"),
        ({"tokens": replaced(70, "<0x4g>")}, "'<0x4g>' is a byte token but does not name a byte"),
        ({"token_type": replaced(70, NORMAL)}, "1 byte tokens are missing, the first is <0x43>"),
        ({"token_type": None}, f"token_type is missing: it must be a list with one entry per token, {COUNT}"),
        ({"token_type": replaced(70, 7)}, "entry 70 is 7; it must be 1 to 6"),
        ({"tokens": replaced(LETTER, "§")}, "tokens is .*: 't', a part of '.*', is missing"),
        (
            {"token_type": replaced(PLAIN.piece_to_id("▁the"), UNUSED)},
            "token [0-9]+, '▁the', is unused but can be merged",
        ),
        (added("§" * (MOST_CHARACTERS + 1)), f"token {COUNT} has 513 characters; at most 512 are supported"),
        ({"precompiled_charsmap": [1, 2]}, "character maps are not supported; put the model's tokenizer.json next to"),
        ({"add_space_prefix": 1}, "add_space_prefix is 1: it must be true or false"),
        ({"remove_extra_whitespaces": "no"}, "remove_extra_whitespaces is .*: it must be true or false"),
        ({"add_bos_token": True, "bos_token_id": 10**6}, "bos_token_id is 1000000: it must have token ids from 0"),
        (added("x" * 65, USER_DEFINED, 0.0), "1 user-defined tokens have score 0; at most 4096 .* 64 characters"),
    ],
    ids=range(20),
)
def test_a_file_that_contradicts_itself(changes: dict[str, Any], said: str) -> None:
    values = {
        name: change(KEYS[f"tokenizer.ggml.{name}"]) if callable(change) else change for name, change in changes.items()
    }
    with pytest.raises(ModelInvalid, match=said) as caught:
        built(KEYS, **values)
    assert "it.gguf: tokenizer.ggml." in caught.value.message and len(caught.value.message) < 500


def many(count: int, length: int, kind: int, score: float) -> dict[str, Any]:
    texts = [f"§{number:0{length - 1}}" for number in range(count)]
    return with_tokens(KEYS, texts, kind, score)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (many(MOST_ALTOGETHER // 500 + 1, 500, NORMAL, -9e9), f"characters; at most {MOST_ALTOGETHER} are"),
        (many(MOST_SYMBOLS + 1, 9, USER_DEFINED, 0.0), f"{MOST_SYMBOLS + 1} user-defined tokens have score 0"),
        (
            with_tokens(many(MOST_SYMBOLS, 9, UNUSED, -9e9), ["<sep>"], USER_DEFINED, 0.0),
            f"are never merged; at most {MOST_SYMBOLS} are supported besides user-defined ones",
        ),
    ],
    ids=["characters", "symbols", "unmerged"],
)
def test_more_than_is_taken(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelInvalid, match=said):
        built(keys)


def test_without_bytes_something_must_stand_for_the_unknown() -> None:
    keys = metadata_of(trained(byte_fallback=False))
    assert built(keys, unknown_token_id=None).encode("§") == built(keys).encode("§")
    kinds = [CONTROL, *keys["tokenizer.ggml.token_type"][1:]]
    with pytest.raises(ModelInvalid, match="unknown_token_id is missing: without byte tokens there must be"):
        built(keys, unknown_token_id=None, token_type=kinds)


def test_a_token_that_only_its_own_text_could_be() -> None:
    """Without bytes all letters of </s> are one unknown token, and beside symbols its text is looked up whole."""
    symbols = [("x", 0.0, USER_DEFINED), ("a", -1.0, NORMAL)]
    with pytest.raises(ModelInvalid, match="is never merged and cannot be distinguished from plain text"):
        built(metadata_of(composed(symbols)))


odd_tokens = st.lists(
    st.sampled_from(["<unk>", "<s>", "", "a", "b", "ab", "▁", "▁a", " ", "a b", "\0", "日", "[", "^", "\\", "<0x00>"])
    | st.text(max_size=4),
    max_size=12,
    unique=True,
)
odd_values = st.none() | st.integers(-2, 12) | st.booleans() | st.just("x") | st.lists(st.integers(0, 9), max_size=3)


@settings(max_examples=400, deadline=None)
@given(data=st.data(), tokens=odd_tokens, with_bytes=st.booleans())
def test_whatever_a_file_says_it_is_built_or_refused(data: st.DataObject, tokens: list[str], with_bytes: bool) -> None:
    names = [text for text, _, _ in BYTES] if with_bytes else []
    tokens = [token for token in tokens if token not in names]
    kinds = data.draw(st.lists(st.integers(1, 6), min_size=len(tokens), max_size=len(tokens)))
    scores = data.draw(st.lists(st.floats(-9, 0, width=16), min_size=len(tokens), max_size=len(tokens)))
    keys = {
        "tokens": tokens + names,
        "token_type": kinds + [BYTE] * len(names),
        "scores": scores + [0.0] * len(names),
        "bos_token_id": 0,
    }
    named = ["bos_token_id", "eos_token_id", "eot_token_id", "unknown_token_id", "add_bos_token", "add_eos_token"]
    flags = ["add_space_prefix", "remove_extra_whitespaces", "precompiled_charsmap"]
    keys |= data.draw(st.dictionaries(st.sampled_from([*named, *flags]), odd_values, max_size=2))
    try:
        ours = built({f"tokenizer.ggml.{name}": value for name, value in keys.items()})
    except ModelInvalid as error:
        assert "it.gguf: tokenizer.ggml." in error.message
        return
    ids = ours.encode("".join(tokens) + " ab日\0")
    assert all(0 <= token < len(tokens) + len(names) for token in ids)
    assert isinstance(ours.decode(ids), str)

"""Text and tokens; and the text of a request, which must not depend on where its tokens end."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from services.common.errors import FieldInvalid, ModelInvalid
from services.engine.api.requests import tokenize
from services.engine.text.tokenizer import TextStream, Tokenizer

SHAKESPEARE = Path(__file__).parents[3] / "models/shakespeare"


def byte_level() -> tokenizers.Tokenizer:
    """Bytes, some merges, and two special tokens."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|endoftext|>", "<|end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator(["the stop stops here, ünïcödé 日本語 🙂🙂 the stopping STOP\n\n"] * 4, trainer)
    return inner


def byte_fallback() -> tokenizers.Tokenizer:
    """As SentencePiece does it: words with ▁ for a space, and single bytes for what is in no word."""
    words = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁the", "你", "é", "▁a"]
    inner = tokenizers.Tokenizer(
        models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    inner.add_special_tokens(["<unk>", "<s>"])
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return inner


BYTES = Tokenizer(byte_level(), 400)
FALLBACK = Tokenizer(byte_fallback(), 400)


def streamed(tokenizer: Tokenizer, ids: list[int], stop: list[str], include_stop: bool = False) -> tuple[str, Any]:
    """The text of a request that ends when its stream says so, else after ``ids``."""
    stream, text = TextStream(tokenizer, stop, include_stop), ""
    for token in ids:
        text += stream.push(token)
        if stream.stopped is not None:
            break
    return text + stream.finish(), stream.stopped


def cut(text: str, stop: list[str], include_stop: bool) -> tuple[str, Any]:
    """The law: read character by character, the first match to be complete, the longest of those, ends the text."""
    for end in range(1, len(text) + 1):
        if found := [s for s in stop if text[:end].endswith(s)]:
            matched = max(found, key=len)
            return text[: end if include_stop else end - len(matched)], matched
    return text, None


# --- the tokenizer ---------------------------------------------------------------------------------------------------


def test_text_survives_a_round_trip() -> None:
    for text in ["", "hello", " ünïcödé 日本語 🙂\n\t", "\0\x7f", "the stop"]:
        assert BYTES.decode(BYTES.encode(text)) == text


def test_special_tokens_are_read_and_left_out_unless_kept() -> None:
    ids = BYTES.encode("a<|endoftext|>b")
    assert len(ids) == 3
    assert BYTES.decode(ids) == "ab"
    assert BYTES.decode(ids, keep_special=True) == "a<|endoftext|>b"


def test_broken_utf8_decodes_to_replacement_characters() -> None:
    ids = BYTES.encode("日")
    assert BYTES.decode(ids[:1] if len(ids) > 1 else []) in {"\ufffd", ""}
    raw = Tokenizer.load(SHAKESPEARE, 1024)
    euro = raw.encode("€")
    assert len(euro) == 3
    assert raw.decode(euro) == "€"
    assert raw.decode(euro[:2]) == "\ufffd"


def test_the_bundled_tokenizer_loads() -> None:
    tokenizer = Tokenizer.load(SHAKESPEARE, 1024)
    assert tokenizer.vocab_size == 1024
    assert tokenizer.decode(tokenizer.encode("To be, or not to be")) == "To be, or not to be"
    assert tokenizer.decode([0]) == ""


def test_ids_the_file_does_not_have_decode_to_nothing() -> None:
    assert BYTES.decode([399, 398]) == ""
    assert streamed(BYTES, [399, *BYTES.encode("the"), 398], []) == ("the", None)


def test_the_beginning_the_file_asks_for_is_added(tmp_path: Path) -> None:
    inner = byte_level()
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    inner.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.load(tmp_path, 400).encode("the") == [0, *BYTES.encode("the")]


def test_a_prompt_is_never_cut_or_padded(tmp_path: Path) -> None:
    inner = byte_level()
    inner.enable_truncation(4)
    inner.enable_padding(length=50)
    inner.save(str(tmp_path / "tokenizer.json"))
    text = "xyzzy plugh xyzzy"
    assert Tokenizer.load(tmp_path, 400).encode(text) == BYTES.encode(text)


@pytest.mark.parametrize(
    "content,said",
    [
        (None, "cannot be read"),
        ("", "not a tokenizer"),
        ("[]", "not a tokenizer"),
        ('{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}', "not a tokenizer"),
        ('{"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}', "not a tokenizer"),
        (b"\xff\xfe", "not a tokenizer"),
        (json.dumps({"model": {"type": "BPE", "vocab": {"a": 0, "b": 400}, "merges": []}}), "token id 400"),
    ],
)
def test_a_file_that_is_no_tokenizer_for_the_model_is_refused(tmp_path: Path, content: Any, said: str) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ModelInvalid, match=said) as caught:
        Tokenizer.load(tmp_path, 400)
    assert "tokenizer.json" in caught.value.message


def test_threads_share_a_tokenizer() -> None:
    texts = [f"the stop {i} 日本語" * 50 for i in range(16)]
    expected = [BYTES.encode(text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(BYTES.encode, texts)) == expected
        assert list(pool.map(BYTES.decode, expected)) == texts


# --- the stream, without stop strings --------------------------------------------------------------------------------

any_ids = st.lists(st.integers(0, 257) | st.integers(258, 335), max_size=40)
#: Mostly text: few characters, so that stop strings made of them occur.
near_text = st.text(st.sampled_from("stop ST\n日🙂é"), max_size=30).map(BYTES.encode)


@settings(max_examples=300, deadline=None)
@given(ids=any_ids | near_text)
def test_the_pieces_are_the_text(ids: list[int]) -> None:
    assert streamed(BYTES, ids, []) == (BYTES.decode(ids), None)


@settings(max_examples=100, deadline=None)
@given(ids=near_text)
def test_every_piece_is_whole_characters_at_once(ids: list[int]) -> None:
    stream = TextStream(BYTES, [], False)
    text = ""
    for count, token in enumerate(ids, 1):
        text += stream.push(token)
        whole = BYTES.decode(ids[:count])
        assert whole.startswith(text)
        # Kept back is only what ends in the middle of a character.
        assert text == whole or whole.endswith("\ufffd")


def test_an_incomplete_character_ends_as_a_replacement() -> None:
    tokenizer = Tokenizer.load(SHAKESPEARE, 1024)
    smile = tokenizer.encode("🙂")
    assert len(smile) == 4
    stream = TextStream(tokenizer, [], False)
    assert [stream.push(token) for token in smile] == ["", "", "", "🙂"]
    assert [stream.push(token) for token in smile[:3]] == ["", "", ""]
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""


def test_special_tokens_are_not_text() -> None:
    assert streamed(BYTES, [0, *BYTES.encode("the"), 1, *BYTES.encode(" stop"), 0], []) == ("the stop", None)


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 264) | st.integers(258, 264), max_size=15))
@example(ids=[84 + 2, 106 + 2, 0xA7 + 2, 262, 0xAB + 2])  # "Tj" is text until the byte after it spoils the run
def test_a_tokenizer_that_falls_back_to_bytes_never_breaks_the_stream(ids: list[int]) -> None:
    text, stopped = streamed(FALLBACK, ids, [])
    assert stopped is None
    whole = FALLBACK.decode(ids)
    # A byte that is no UTF-8 changes what the bytes before it decode to, and those were handed out.
    assert text == whole or "\ufffd" in whole
    assert len(text) == len(whole) or "\ufffd" in whole


# --- stop strings ----------------------------------------------------------------------------------------------------

stops = st.lists(st.text(st.sampled_from("stop ST\n日🙂é"), min_size=1, max_size=6), min_size=1, max_size=4)


@settings(max_examples=500, deadline=None)
@given(ids=near_text | any_ids, stop=stops, include_stop=st.booleans())
@example(ids=BYTES.encode("abcde"), stop=["bcde", "cd"], include_stop=False)
@example(ids=BYTES.encode("abcdx"), stop=["bcde", "cd"], include_stop=True)
@example(ids=BYTES.encode("ababac"), stop=["abac", "bab"], include_stop=True)
@example(ids=BYTES.encode("stopstop"), stop=["stop", "stops", "tops"], include_stop=True)
@example(ids=BYTES.encode("abcx"), stop=["abcd", "bc"], include_stop=False)
def test_the_text_is_cut_at_the_first_match_to_be_complete(ids: list[int], stop: list[str], include_stop: bool) -> None:
    # What the tokens after a match would add is no part of the text: a request may still run a token more.
    assert streamed(BYTES, ids, stop, include_stop) == cut(BYTES.decode(ids), stop, include_stop)


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.sampled_from("stopST "), max_size=20), stop=stops, include_stop=st.booleans())
def test_how_the_text_falls_into_tokens_changes_nothing(text: str, stop: list[str], include_stop: bool) -> None:
    singles = [token for character in text for token in BYTES.encode(character)]
    assert streamed(BYTES, singles, stop, include_stop) == streamed(BYTES, BYTES.encode(text), stop, include_stop)


def test_text_is_held_back_only_while_it_may_become_a_stop() -> None:
    stream = TextStream(BYTES, ["stop"], False)
    pieces = [stream.push(BYTES.encode(character)[0]) for character in "a st, sto"]
    assert pieces == ["a", " ", "", "", "st,", " ", "", "", ""]
    assert stream.finish() == "sto"
    assert stream.stopped is None


def test_a_match_ends_the_stream_at_once_when_no_longer_one_can_come() -> None:
    stream = TextStream(BYTES, ["st", "zz"], False)
    assert [stream.push(BYTES.encode(character)[0]) for character in "as"] == ["a", ""]
    assert stream.push(BYTES.encode("t")[0]) == ""
    assert stream.stopped == "st"
    assert stream.finish() == ""


@settings(max_examples=500, deadline=None)
@given(ids=near_text | any_ids, stop=stops, include_stop=st.booleans(), least=st.integers(0, 4))
@example(ids=BYTES.encode("astopping"), stop=["stopping!", "to"], include_stop=False, least=0)
@example(ids=BYTES.encode("\n\n"), stop=["\n", "\n\n"], include_stop=True, least=0)
def test_a_request_ends_with_the_token_that_completes_a_stop(
    ids: list[int], stop: list[str], include_stop: bool, least: int
) -> None:
    # The slow model: all of the text, searched again after each token.
    plain = TextStream(BYTES, (), False)
    texts = [plain.push(token) for token in ids]
    deferred, seen, taken = "".join(texts[:least]), "", 0
    for taken, text in enumerate(texts, 1):
        seen += text if taken > least else ""
        if any(s in seen for s in stop):
            break
    shown, stopped = cut(seen, stop, include_stop)
    stream, pieces = TextStream(BYTES, stop, include_stop, least), list[str]()
    for token in ids:
        pieces.append(stream.push(token))
        if stream.stopped is not None:
            break
        # What is not shown yet is the beginning of a stop string.
        held = "".join(texts[: len(pieces)])[len("".join(pieces)) :]
        assert not held or any(s != held and s.startswith(held) for s in stop)
    assert (len(pieces), stream.stopped) == (taken, stopped)
    if stopped is not None:
        assert "".join(pieces) == deferred + shown


def test_a_match_ends_the_stream_while_an_earlier_or_longer_one_is_open() -> None:
    for stop, pieces in (
        (["\n", "\n\n"], ["a", ""]),
        (["a\nb", "\n"], ["", "a"]),
    ):
        stream = TextStream(BYTES, stop, False)
        assert [stream.push(BYTES.encode(character)[0]) for character in "a\n"] == pieces
        assert stream.stopped == "\n" and stream.finish() == ""


def test_a_stop_string_may_hold_characters_of_several_tokens() -> None:
    tokenizer = Tokenizer.load(SHAKESPEARE, 1024)
    ids = tokenizer.encode("be 🙂🙃 not")
    assert streamed(tokenizer, ids, ["🙃"]) == ("be 🙂", "🙃")
    assert streamed(tokenizer, ids, ["🙂🙃 n"], include_stop=True) == ("be 🙂🙃 n", "🙂🙃 n")


def test_a_stop_string_may_be_what_broken_text_ends_with() -> None:
    tokenizer = Tokenizer.load(SHAKESPEARE, 1024)
    assert streamed(tokenizer, tokenizer.encode("a🙂")[:-1], ["\ufffd"]) == ("a", "\ufffd")


def test_text_that_a_tokenizer_has_no_token_for_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(tokenizers.Tokenizer(models.Unigram([("a", -1.0)], None)).to_str())
    loaded = Tokenizer.load(tmp_path, 8)
    assert loaded.encode("aa") == [0, 0]
    with pytest.raises(FieldInvalid, match="the model's tokenizer cannot encode the text"):
        loaded.encode("b")
    with pytest.raises(FieldInvalid) as refused:
        asyncio.run(tokenize("b", loaded, "prompt.text"))
    assert refused.value.field == "prompt.text"

"""How a request ends, and its counts."""

from __future__ import annotations

import pytest

from services.engine.scheduling.sequence import FinishReason, Outcome, Request, Sequence, Stopping
from tests.engine.fakes import PlainText, make_request


def fed(tokens: list[int], **options: object) -> tuple[str, Outcome | None, int]:
    """The text, the outcome and the number of tokens accepted."""
    sequence, shown = Sequence(make_request(**options), 1), ""  # type: ignore[arg-type]
    for at, token in enumerate(tokens):
        text, outcome = sequence.accept(token, now=float(at))
        shown += text
        if outcome is not None:
            return shown, outcome, at + 1
    return shown, None, len(tokens)


def test_length() -> None:
    assert fed([1, 2, 3], max_tokens=3) == ("bcd", Outcome(FinishReason.LENGTH), 3)
    assert fed([1, 2], max_tokens=3) == ("bc", None, 2)


def test_eos_ends_and_is_no_text() -> None:
    assert fed([1, 5], eos=True, max_tokens=9) == ("b", Outcome(FinishReason.EOS, stop_token_id=5), 2)
    assert fed([1, 5], eos=False, max_tokens=9) == ("bf", None, 2)


def test_eos_at_the_last_token_is_eos() -> None:
    assert fed([1, 5], eos=True, max_tokens=2)[1] == Outcome(FinishReason.EOS, stop_token_id=5)


def test_stop_token() -> None:
    assert fed([1, 2, 3], stop_token_ids=(2,), max_tokens=9) == ("b", Outcome(FinishReason.STOP, stop_token_id=2), 2)


def test_stop_string() -> None:
    assert fed([1, 2, 3], stop=("cd",), max_tokens=9)[1:] == (Outcome(FinishReason.STOP, stop_text="cd"), 3)
    assert fed([1, 2, 3], stop=("cd",), max_tokens=3)[1] == Outcome(FinishReason.STOP, stop_text="cd")


def test_min_tokens_defers_eos_and_stop_tokens() -> None:
    assert fed([5, 5, 5, 5], eos=True, min_tokens=3, max_tokens=9)[1:] == (
        Outcome(FinishReason.EOS, stop_token_id=5),
        4,
    )
    assert fed([2, 2, 2], stop_token_ids=(2,), min_tokens=2, max_tokens=9)[2] == 3
    assert fed([5, 5, 5], eos=True, min_tokens=3, max_tokens=3)[1] == Outcome(FinishReason.LENGTH)


class Holding(PlainText):
    """Holds everything back until the end, where a stop string may turn up."""

    def __init__(self, rest: str, stopped: str | None = None) -> None:
        super().__init__()
        self.rest, self.found = rest, stopped

    def push(self, token: int) -> str:
        return ""

    def finish(self) -> str:
        self.stopped = self.found
        return self.rest


@pytest.mark.parametrize(("token", "reason"), [(5, FinishReason.EOS), (4, FinishReason.STOP), (1, FinishReason.LENGTH)])
def test_what_was_held_back_comes_out_at_the_end(token: int, reason: FinishReason) -> None:
    stopping = Stopping(1, 0, frozenset({5}), frozenset({4}))
    text, outcome = Sequence(Request("r", [0], stopping, 0, Holding("rest")), 1).accept(token, 0.0)
    assert text == "rest" and outcome is not None and outcome.reason is reason


@pytest.mark.parametrize("token", [5, 4, 1])
def test_a_stop_string_found_at_the_end_comes_first(token: int) -> None:
    stopping = Stopping(1, 0, frozenset({5}), frozenset({4}))
    sequence = Sequence(Request("r", [0], stopping, 0, Holding("re", "st")), 1)
    assert sequence.accept(token, 0.0) == ("re", Outcome(FinishReason.STOP, stop_text="st"))


def test_counts_and_the_time_of_the_first_token() -> None:
    sequence = Sequence(make_request(prompt=[1, 2, 3], max_tokens=4), 1)
    assert (sequence.num_tokens, sequence.num_generated_tokens, sequence.max_resident_tokens) == (3, 0, 6)
    assert sequence.resident_target == 4
    sequence.accept(0, 7.0)
    sequence.accept(0, 8.0)
    assert sequence.first_token_at == 7.0 and sequence.num_generated_tokens == 2
    sequence.accept(0, 9.0)
    assert sequence.resident_target == 6


def test_unreported_pages() -> None:
    sequence = Sequence(make_request(prompt=[1] * 20), 1)
    sequence.num_computed_tokens, sequence.num_reported_tokens = 11, 5
    assert sequence.unreported_pages(4) == 1
    sequence.num_computed_tokens = 12
    assert sequence.unreported_pages(4) == 2
    sequence.num_reported_tokens = 12
    assert sequence.unreported_pages(4) == 0


def test_it_shows_its_state() -> None:
    assert repr(Sequence(make_request("a"), 1)) == "<Sequence a WAITING: 0 of 3 tokens computed, 0 pages>"

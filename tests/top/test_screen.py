"""What `top` shows fits the terminal, and says by characters what it says by colours."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.top.screen import EXPLANATION, ORDERS, STATES, render, shares
from services.top.view import EngineView, PoolView, SequenceView, SessionView, View


def view(sequences: int = 30) -> View:
    pool = PoolView("shakespeare@63b132ac7cbf73f2", 100, 50, 25, 5, 20, 0.5, 0.25, 12, 3)
    return View(
        "unix:/run/user/1000/rocmforge/kvcache.sock",
        0x1234,
        4000.0,
        [pool],
        [
            SessionView("a1b2c3d4e5f6", "engine-0", "uid:1000", pool.id, sequences, 50, 8.0, 10.0),
            SessionView("b1b2c3d4e5f6", "engine-1", "", pool.id, 0, 20, 0.0, 0.0, "lost: alive"),
        ],
        [
            SequenceView(f"sequence-with-a-long-name-{at:04}", f"engine-{at % 2}", at, 40.0 - at, 7 * at % 31, at, 2)
            for at in range(sequences)
        ],
        sequences,
        [
            EngineView("127.0.0.1:50051", "shakespeare", 3, 1, 1024, 0.0421, 110.4),
            EngineView("127.0.0.1:50052", trouble="no answer"),
        ],
    )


@pytest.mark.parametrize(("width", "height"), [(80, 24), (40, 10), (200, 60), (20, 3), (1, 1)])
def test_it_fits(width: int, height: int) -> None:
    for key in ORDERS:
        lines = render(view(), width, height, key).plain.splitlines()
        assert len(lines) <= height and all(len(line) <= width for line in lines)


def test_everything_is_there_at_80_by_24() -> None:
    text = render(view(), 80, 24).plain
    assert len(text.splitlines()) == 24
    for words in (
        *("up 67m", "epoch 0000000000001234", "200 pages", "hit 50% (25%)", "new/s 12 out/s 3"),
        *("# held 50", "= cached 25", "+ retained 5", "! quarantined 20", ". free 100"),
        *("shakespeare", "3      1/1024", "42ms", "110", "no answer"),
        *("a1b2c3d4e5f6", "8/10s", "lost: alive", "SEQUENCE 30", "hit age v", "q quit"),
    ):
        assert words in text, words


def test_the_map_shows_every_state_by_its_own_character() -> None:
    [bar] = [line for line in render(view(), 80, 24).plain.splitlines() if line.startswith("#####")]
    assert [bar.count(mark) for mark, _, _ in STATES] == [20, 10, 2, 8, 0, 40]
    assert len({mark for mark, _, _ in STATES}) == len(STATES) == len({style for _, _, style in STATES})


@given(st.lists(st.integers(0, 10**7), min_size=5, max_size=5), st.integers(5, 300))
def test_shares_add_up_and_hide_nothing(counts: list[int], cells: int) -> None:
    given_ = shares(tuple(counts), cells)
    assert sum(given_) == (cells if sum(counts) else 0)
    assert all((share > 0) == (count > 0) for share, count in zip(given_, counts, strict=True))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("key", list(ORDERS))
def test_sequences_are_sorted(key: str, reverse: bool) -> None:
    shown = view()
    lines = render(shown, 80, 60, key, reverse=reverse).plain.splitlines()
    at = next(at for at, line in enumerate(lines) if line.startswith("SEQUENCE"))
    ends = {one.id[-15:]: one for one in shown.sequences}
    values = [ORDERS[key][1](ends[line[1:16]]) for line in lines[at + 1 : at + 31]]
    ordered = sorted(values, reverse=(key == "o") == reverse)
    assert values == ordered and ORDERS[key][0] in lines[at]


def test_what_does_not_answer_is_said() -> None:
    text = render(View("unix:/run/x", trouble="connection refused"), 80, 24).plain
    assert "the daemon does not answer: connection refused" in text and "epoch" not in text


def test_the_explanation_fits_80_by_24_and_names_every_state_and_key() -> None:
    lines = EXPLANATION.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    assert all(f"{mark}  {name}" in EXPLANATION for mark, name, _ in STATES)
    assert "a i p t o" in EXPLANATION


def test_a_name_writes_nothing_to_the_terminal_but_its_characters() -> None:
    """Names are whatever an engine or its callers say: they clear no screen, and begin no line."""
    name = "\x1b[2J\n\r\x9b1m\u202e"
    hostile = View(
        "127.0.0.1:50052",
        1,
        1.0,
        [PoolView(name, 100, 50, 25, 5, 20, 0.5, 0.25, 12, 3)],
        [SessionView("a1b2c3d4e5f6", name, name, name, 1, 50, 8.0, 10.0)],
        [SequenceView(name, name, 1, 1.0, 1, 1, 1)],
        1,
        [EngineView(name, name, 3, 1, 1024, 0.0421, 110.4), EngineView("b", trouble=name)],
        trouble=name,
    )
    text = render(hostile, 120, 40).plain
    assert "[2J" in text
    assert all(character.isprintable() for line in text.split("\n") for character in line)
    assert len(text.split("\n")) == 40

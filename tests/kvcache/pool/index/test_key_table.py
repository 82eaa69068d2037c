"""The table of keys is a dict from a key to a page, whatever the keys are."""

from __future__ import annotations

from array import array

import hypothesis.strategies as st
import pytest
from hypothesis import given

from services.kvcache.pool.index.key_table import KeyTable

PAGES = 12

#: Keys that share their low bits, and so their places, and such as do not.
KEYS = st.sampled_from([0, 1, 2, 31, 32, 64, 96, 1 << 63, (1 << 64) - 1]) | st.integers(0, (1 << 64) - 1)


@given(st.lists(st.tuples(st.integers(0, PAGES - 1), KEYS, st.booleans()), max_size=60))
def test_it_does_what_a_dict_does(actions: list[tuple[int, int, bool]]) -> None:
    keys = array("Q", bytes(8 * PAGES))
    table, expected = KeyTable(keys), dict[int, int]()
    for page, key, replaces in actions:
        if page in expected.values():
            expected.pop(keys[page])
            table.remove(keys[page])
        else:
            keys[page] = key
            if replaces and key in expected:
                table.replace(page)
                expected[key] = page
            else:
                assert table.add(page) == expected.setdefault(key, page)
        assert {key: table[key] for key in expected} == expected
        assert table.get(key) == expected.get(key)
        assert not any(table.walk(lambda page: page in expected.values()))


def test_what_is_not_there() -> None:
    keys = array("Q", [5, 69])
    table = KeyTable(keys)
    table.add(0)
    assert table.get(69) is None
    with pytest.raises(KeyError, match="69"):
        table[69]
    with pytest.raises(KeyError, match="69"):
        table.remove(69)
    assert list(filter(None, table.walk(lambda page: False))) == [
        "page 0 is found by its key 0000000000000005 and is not indexed"
    ]
    keys[0] = 6
    assert list(filter(None, table.walk(lambda page: True))) == ["page 0 is not found by its key 0000000000000006"]


def test_a_page_with_two_slots() -> None:
    table = KeyTable(array("Q", [5, 69]))
    table.add(0)
    table._pages[1] = 0  # of which a search finds one
    assert list(filter(None, table.walk(lambda page: True))) == ["page 0 is not found by its key 0000000000000005"]

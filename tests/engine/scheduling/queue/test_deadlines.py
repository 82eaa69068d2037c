"""Names by the time at which they are due, against the plainest model there is."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from services.engine.scheduling.queue.deadlines import Deadlines

NAMES = st.sampled_from("abcdef")
TIMES = st.integers(0, 9).map(float)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), NAMES, TIMES),
        st.tuples(st.just("discard"), NAMES, TIMES),
        st.tuples(st.just("take"), NAMES, TIMES),
    )
)


@given(STEPS)
def test_it_is_a_map_read_in_order_of_time(steps: list[tuple[str, str, float]]) -> None:
    deadlines, model = Deadlines(), dict[str, float]()
    for step, name, at in steps:
        if step == "add":
            deadlines.add(name, at)
            model[name] = at
        elif step == "discard":
            deadlines.discard(name)
            model.pop(name, None)
        else:
            due = sorted((time, name) for name, time in model.items() if time <= at)
            assert deadlines.take(at) == [name for _, name in due]
            model = {name: time for name, time in model.items() if time > at}
        assert len(deadlines) == len(deadlines._at) == len(model)
        assert deadlines.next_at == min(model.values(), default=math.inf)

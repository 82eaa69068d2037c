"""Every state that a transition system can reach, breadth first, and the shortest way to the first bad one."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

State = TypeVar("State", bound=Hashable)


@dataclass(slots=True)
class Found(Generic[State]):
    """How many states there are, how often each kind of step was taken, and the steps to a violation, if there is one.

    A step is named by a word and what it is done to; its kind is the word.
    """

    states: int = 0
    taken: Counter[str] = field(default_factory=Counter)
    violation: str = ""
    trace: list[str] = field(default_factory=list)
    last: State | None = None

    def __str__(self) -> str:
        return "\n".join([*self.trace, f"=> {self.violation or 'nothing is wrong'}, {self.states} states"])


def search(
    first: State,
    steps: Callable[[State], Iterable[tuple[str, State]]],
    violated: Callable[[State], str],
    most: int = 5_000_000,
) -> Found[State]:
    """Look at all states; stops at the first violation. Raises MemoryError beyond ``most`` states: not exhaustive."""
    came: dict[State, tuple[State, str] | None] = {first: None}
    todo, found = deque([first]), Found[State]()
    while todo:
        state = todo.popleft()
        if problem := violated(state):
            found.violation, found.last = problem, state
            while (before := came[state]) is not None:
                state, step = before
                found.trace.insert(0, step)
            break
        for name, after in steps(state):
            found.taken[name.partition(" ")[0]] += 1
            if after not in came:
                came[after] = state, name
                todo.append(after)
        if len(came) > most:
            raise MemoryError(f"more than {most} states")
    found.states = len(came)
    return found

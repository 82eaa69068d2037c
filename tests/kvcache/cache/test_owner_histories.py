"""Histories of calls by several identities: a session does what its owner says, and nothing that others say."""

from __future__ import annotations

from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import ServiceError, SessionExpired
from services.kvcache.cache.cache import KvCache
from services.kvcache.cache.opening import Opening, Prompt
from services.kvcache.cache.steps import Steps
from tests.kvcache.cache.test_owners import attached
from tests.kvcache.fakes import World

IDENTITIES = ("uid:1", "uid:2", "cn:engine")
CALLS = ("open", "step", "append", "remove", "get", "list", "renew", "close")


def state(cache: KvCache) -> object:
    """All that a caller could have changed."""
    return [
        (session.handle, session.deadline, session.held_pages, list(session.removed))
        for session in cache._sessions.all()
    ] + [
        (sequence.id, session.handle, list(sequence.tokens), list(sequence.pages), sequence.access_count)
        for sequence, session in cache.calls.list_sequences(None, 0, 1000)[0]
    ]


def call(cache: KvCache, name: str, session: str, sequence: str, caller: str) -> object:
    """One call; what an item of it was refused for counts as an answer."""
    match name:
        case "open":
            opening = Opening(sequence, Prompt(array("I", range(9)), "", None), 3)
            return cache.calls.allocate(session, [opening], [], caller)[0]
        case "step":
            return cache.calls.allocate(
                session, [Steps([sequence], [0], [4], array("I", range(4)), [3], [3])], [], caller
            )[0]
        case "append":
            return cache.calls.append(session, Steps([sequence], [0], [1], array("I", [0]), [], []), caller)
        case "remove":
            return cache.calls.remove(session, [sequence], caller)[0]
        case "get":
            return cache.calls.get_sequence(session, sequence, caller)
        case "list":
            return cache.calls.sequences_of(session, 0, 1000, caller)
        case "renew":
            return cache.renew_session(session, caller)
        case _:
            return cache.close_session(session, caller)


@settings(max_examples=150)
@given(
    st.lists(
        st.tuples(st.sampled_from(CALLS), st.integers(0, 2), st.sampled_from("abc"), st.sampled_from(IDENTITIES)),
        max_size=40,
    )
)
def test_only_its_owner_moves_a_session(history: list[tuple[str, int, str, str]]) -> None:
    world = World(12)
    sessions = {owner: attached(world, owner) for owner in IDENTITIES}
    gone: set[str] = set()
    for name, at, sequence, caller in history:
        owner = IDENTITIES[at]
        session = sessions[owner].id
        world.now += 0.01
        before = state(world.cache)
        answer: object
        try:
            answer = call(world.cache, name, session, sequence, caller)
        except ServiceError as error:
            answer = error
        lives = caller == owner and owner not in gone
        assert isinstance(answer, SessionExpired) == (not lives and name != "close"), (name, owner, caller, answer)
        if not lives:
            assert state(world.cache) == before, (name, owner, caller)
            assert name != "close" or answer is None
        elif name == "close":
            gone.add(owner)
        world.sound()

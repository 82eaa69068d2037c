"""Agentic traffic, made from published distributions: sessions of coding agents that call tools and wait for people.

A session works on one repository and takes requests from a person. A request is a loop of calls: each call but the
last ends in a tool call, whose result begins the next; after the last one the person reads, thinks, and asks again, or
never comes back. Every call's prompt is the whole context so far.

All counts, lengths and times are log-normal and given by their median and 90th percentile, as they were published:

- TraceLab (Zhu et al., arXiv 2606.30560; its tables of counts, times and appended tokens): 4 265 sessions of Claude
  Code and Codex with 357 161 model calls. Requests a session, tool calls a request, the time of a tool, of a person and
  of the model, tokens appended by a call.
- AIPerf (ai-dynamo/aiperf, its generator ``agentic_code_gen`` and the configuration ``inference-day-2026``): what
  prompts share. All sessions begin with the same 32 000 tokens, tools and the system prompt; then come 10 000 of one
  of 100 repositories, Zipf 0.6; then what the session alone has, 5 000 (mean 15 000); at 200 000 the context is
  compacted, which here means that the session begins again.

Beside them are calls of an API with one of 20 long system prompts and a text that never comes back: single-turn
requests that share only their system prompt made 97 % of the hits of one of the traces in Wang et al., ATC 2025. Their
share of the requests is an assumption, and so is the rate at which sessions begin.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from services.kvcache.eviction.hints import ReuseHint

#: The standard normal distribution's 90th percentile.
_P90 = 1.2815515655446004


class LogNormal(NamedTuple):
    """A log-normal distribution by its median and 90th percentile, cut off at ``most``."""

    median: float
    p90: float
    most: float = math.inf

    def draw(self, source: random.Random) -> float:
        """One value."""
        sigma = math.log(self.p90 / self.median) / _P90
        return min(self.most, source.lognormvariate(math.log(self.median), sigma))


#: TraceLab, "Per session" and "Per request": requests a session, tool calls a request.
REQUESTS = LogNormal(1, 18, 200)
TOOL_CALLS = LogNormal(2, 20, 150)
#: TraceLab, "Per individual latency", in seconds: a tool, a person, the model.
TOOL_S = LogNormal(0.3, 13.6, 3600)
PERSON_S = LogNormal(84, 1236, 24 * 3600)
MODEL_S = LogNormal(5.7, 22.2, 600)
#: TraceLab, tokens appended by a call whose prefix has 64k to 128k tokens, Claude and Codex.
APPENDED = LogNormal(795, 4900, 100_000)
#: AIPerf, tokens; of the session's own: median 5 000 and mean 15 000.
HARNESS, REPOSITORY, OWN = 32_000, 10_000, LogNormal(5_000, 33_400, 50_000)
REPOSITORIES, ZIPF = 100, 0.6
CONTEXT = 200_000
#: Assumptions: sessions a second, API calls a second, the lengths of an API call's system prompt and of its text.
SESSIONS, API_CALLS = 0.05, 0.5
SYSTEM_PROMPTS, SYSTEM_PROMPT, TEXT = 20, 8_000, LogNormal(4_000, 16_000, 100_000)


class Call(NamedTuple):
    """One request to the engine: its prompt's blocks, what it ends in, and ``away_s``, the time from its arrival to the
    next of its session; None if none comes. Calls of one ``session`` share its number.
    """

    at: float
    blocks: list[int]
    category: str
    turn: int
    calls_tool: bool
    away_s: float | None
    session: int


@dataclass
class Agents:
    """Agentic traffic from ``seed``, in blocks of ``block_tokens``. The same arguments give the same traffic."""

    seed: int
    block_tokens: int = 512
    sessions_per_s: float = SESSIONS
    api_calls_per_s: float = API_CALLS

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._ids = itertools.count()
        self._harness = self._blocks(HARNESS)
        self._repositories = [self._blocks(REPOSITORY) for _ in range(REPOSITORIES)]
        self._weights = [(1 + rank) ** -ZIPF for rank in range(REPOSITORIES)]
        self._system_prompts = [self._blocks(SYSTEM_PROMPT) for _ in range(SYSTEM_PROMPTS)]

    def calls(self, count: int) -> list[Call]:
        """The first ``count`` calls, in order of arrival."""
        return list(itertools.islice(self._calls(), count))

    def _calls(self) -> Iterator[Call]:
        numbers = itertools.count()
        due: list[tuple[float, int, Call, Iterator[Call]]] = []
        arrivals = [(self.sessions_per_s, self._session), (self.api_calls_per_s, self._api_call)]
        coming = [(self._random.expovariate(rate), rate, begin) for rate, begin in arrivals if rate]

        def push(calls: Iterator[Call]) -> None:
            if (call := next(calls, None)) is not None:
                heapq.heappush(due, (call.at, next(numbers), call, calls))

        while True:
            first = min(range(len(coming)), key=lambda one: coming[one][0])
            at, rate, begin = coming[first]
            while due and due[0][0] <= at:
                _, _, call, calls = heapq.heappop(due)
                yield call
                push(calls)
            push(begin(at, next(numbers)))
            coming[first] = (at + self._random.expovariate(rate), rate, begin)

    def _session(self, at: float, number: int) -> Iterator[Call]:
        draw = self._random
        [repository] = draw.choices(self._repositories, self._weights)
        shared = self._harness + repository
        tokens, own = OWN.draw(draw), list[int]()
        own = self._blocks(tokens)
        left = max(1, round(REQUESTS.draw(draw)))
        tools, turn = round(TOOL_CALLS.draw(draw)), 0
        while left:
            turn += 1
            away_s: float | None = MODEL_S.draw(draw) + (TOOL_S if tools else PERSON_S).draw(draw)
            if left == 1 and not tools:
                away_s = None
            yield Call(at, shared + own, "agent", turn, tools > 0, away_s, number)
            if away_s is None:
                return
            at += away_s
            if tools:
                tools -= 1
            else:
                left, tools = left - 1, round(TOOL_CALLS.draw(draw))
            tokens += APPENDED.draw(draw)
            if len(shared) * self.block_tokens + tokens > CONTEXT:
                tokens, own = OWN.draw(draw), []
            own = own + self._blocks(tokens - len(own) * self.block_tokens)

    def _api_call(self, at: float, number: int) -> Iterator[Call]:
        system = self._random.choice(self._system_prompts)
        yield Call(at, system + self._blocks(TEXT.draw(self._random)), "api", 1, False, None, number)

    def _blocks(self, tokens: float) -> list[int]:
        """Complete blocks of content that nothing else has."""
        return [next(self._ids) for _ in range(int(tokens) // self.block_tokens)]


def hints(calls: list[Call], seed: int, right: float = 1.0, estimates: bool = True) -> list[ReuseHint]:
    """What the callers say of each call: all of them their category and turn.

    Agents say whether a tool call is pending, and are ``right`` in that share of the calls. When they say so, and with
    ``estimates``, they also estimate when they return: the time that it takes, times or divided by e one time in three
    (log-normal, sigma 1). Of people nothing is estimated.
    """
    draw, said = random.Random(seed), []
    for call in calls:
        if call.category == "api":
            said.append(ReuseHint(call.category, call.turn))
            continue
        pending = call.calls_tool == (draw.random() < right)
        time_s = call.away_s if call.calls_tool else MODEL_S.draw(draw) + TOOL_S.draw(draw)
        factor = draw.lognormvariate(0, 1)
        expected_s = min(86400.0, time_s * factor) if pending and estimates and time_s is not None else None
        said.append(ReuseHint(call.category, call.turn, pending, expected_s))
    return said

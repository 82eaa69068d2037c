"""An engine in a hundred lines: a toy model whose K and V lie in the daemon's pages.

    python clients/python/examples/toy_engine.py ADDRESS [TOKENS]

Run it twice, or in two processes at once: who comes second finds the prompt's pages in the prefix cache.
"""

from __future__ import annotations

import itertools
import os
import sys
import time

import numpy as np

from rocmforge.client import Demand, Grant, KvCache, KvCacheDown, PageLayout, SessionExpired

LAYOUT = PageLayout(page_size=4, layers=2, kv_heads=1, head_dim=8, dtype="f32")
PROMPT = [
    int(word)
    for word in ["3", "14", "15", "9", "26", "5", "35", "8", "9", "7", "9", "32", "38", "46", "26", "43", "38", "32"]
]
# The model: embeddings, and for each layer what makes q, k and v. Of float64, so that one token follows from the last.
EMBEDDINGS, LAYERS = np.split(np.random.default_rng(7).normal(size=(64 + 2 * 3 * 8, 8)), [64])
WEIGHTS = LAYERS.reshape(2, 3, 8, 8) / 8**0.5


class ToyEngine:
    """Serves one request after another; an engine with a batch makes one step call for all of them."""

    def __init__(self, cache: KvCache) -> None:
        self.cache = cache
        self._ids = (f"{os.getpid()}-{number}" for number in itertools.count())  # an id is used once in a session

    def generate(self, prompt: list[int], count: int) -> tuple[list[int], int]:
        """Returns ``count`` tokens, and how many of the prompt's were cached, whatever happens to the daemon."""
        while True:
            try:
                return self._attempt(next(self._ids), prompt, count)
            except (SessionExpired, KvCacheDown) as error:
                print(f"{error.reason}: computing it again", file=sys.stderr)
            while True:  # nothing of ours writes now, so the lost session may be closed, and another opened
                try:
                    self.cache.reopen()
                    break
                except KvCacheDown:
                    time.sleep(0.2)

    def _attempt(self, name: str, prompt: list[int], count: int) -> tuple[list[int], int]:
        pages = -(-(len(prompt) + count) // LAYOUT.page_size)
        grant = self._granted(Demand.of_prompt(name, prompt, pages))
        table, tokens, resident = list(grant.pages), list(prompt), grant.cached_tokens
        while len(tokens) < len(prompt) + count:
            self._check_lease()  # before a step: it must end while the pages are ours
            drawn = [self._forward(table, position, tokens[position]) for position in range(resident, len(tokens))][-1]
            self._check_lease()  # and after it: pages that it read could have been given to others
            # The step is over, so what it wrote may be published. Many tokens in one call would do as well.
            self._granted(Demand.of_step(name, resident, tokens[resident:], pages, len(table)))
            resident = len(tokens)
            tokens.append(drawn)
        self.cache.step([], removed=[name])
        return tokens[len(prompt) :], grant.cached_tokens

    def _granted(self, demand: Demand) -> Grant:
        [grant] = self.cache.step([demand])
        if grant.error is not None:
            raise grant.error
        kv = self.cache.pages.numpy().kv
        for copy in grant.copies:  # of forks alone: a page that others hold is not written
            kv[copy.target] = kv[copy.source]
        return grant

    def _check_lease(self) -> None:
        if not self.cache.may_write():
            raise SessionExpired("the lease may be over")

    def _forward(self, table: list[int], position: int, token: int) -> int:
        """Write K and V of one token, attend over those of all before it, and draw the next."""
        kv = self.cache.pages.numpy().kv  # [page, layer, (k, v), kv_head, slot, head_dim]
        page, slot = table[position // LAYOUT.page_size], position % LAYOUT.page_size
        state = EMBEDDINGS[(token + position) % 64]
        for layer, (wq, wk, wv) in enumerate(WEIGHTS):
            kv[page, layer, :, 0, slot] = state @ wk, state @ wv
            keys, values = kv[table, layer].transpose(1, 2, 0, 3, 4)[:, 0].reshape(2, -1, 8)[:, : position + 1]
            scores = np.exp(keys @ (state @ wq))
            state = state + scores @ values / scores.sum()
        return int(np.argmax(EMBEDDINGS @ state))


def main() -> None:
    """Generate from one prompt, twice as long a text as it has tokens."""
    address, count = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 2 * len(PROMPT)
    with KvCache.connect(address, "toy@1", LAYOUT, pool_pages=4096, client_name="toy engine") as cache:
        tokens, cached = ToyEngine(cache).generate(PROMPT, count)
        print(f"{cached} of {len(PROMPT)} prompt tokens were cached")
        print(*tokens)


if __name__ == "__main__":
    main()

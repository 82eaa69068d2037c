"""One request's block table, as a sequence of the daemon."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


class Request(Protocol):
    """vLLM's ``Request``, as far as it is read here."""

    request_id: str
    num_computed_tokens: int
    max_tokens: int
    skip_reading_prefix_cache: bool

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""

    @property
    def block_hashes(self) -> Sequence[Any]:
        """vLLM's hashes of the whole blocks of its tokens."""

    @property
    def num_tokens(self) -> int:
        """Tokens that are known: the prompt's and the generated ones."""

    @property
    def all_token_ids(self) -> Sequence[int]:
        """They themselves."""


@dataclass(slots=True, eq=False)
class Table:
    """Pages [0, ``used``) are vLLM's block table of the request; the others are granted ahead.

    The first ``cached`` tokens were there when the sequence was opened; the ``resident`` ones are published. ``turn``
    is when vLLM asked for it last, ``wanted`` how many pages it takes to run it. A ``broken`` one was ended by the
    daemon. ``hashes`` are vLLM's, of the whole pages that it will publish; ``final`` counts the tokens whose K and V
    had been written when it ended.
    """

    request: Request
    salt: str
    shares: bool
    name: str = ""
    open: bool = False
    pages: list[int] = field(default_factory=list)
    cached: int = 0
    resident: int = 0
    used: int = 0
    turn: int = -1
    wanted: int = 0
    broken: bool = False
    retry_at: float = 0.0
    bare: bool = False  # opened without pages of its own, since the pool had none
    hashes: Sequence[Any] = ()
    announced: int = 0  # of the hashes, those before it are published
    ended: bool = False
    final: int = 0

    @property
    def written(self) -> int:
        """Tokens whose K and V are in the pages: of the steps that are over."""
        return self.final if self.ended else min(self.request.num_computed_tokens, self.request.num_tokens)

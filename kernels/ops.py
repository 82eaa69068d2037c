"""The interface of a backend. `ops_numpy` and `ops_cupy.CupyOps` implement it; the former is the reference.

Arrays, plans, places, angles and pages are opaque to callers, who only pass on what another function returned.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class Ops(Protocol):
    """A backend; the docstrings of module `ops_numpy`, which is one, define shapes and semantics."""

    def weight(self, tensor: NDArray[Any], dtype: str) -> Any:
        """Convert a weight, which the caller gives up, to the form that the other functions take.

        Raises ValueError if it cannot be stored as that type.
        """

    def step(self, lengths: NDArray[np.int64]) -> AbstractContextManager[None]:
        """The context in which to call `indices`, `places`, `rotation` and `attention_plan`: their results go to the
        device in one copy.

        ``lengths`` ``[rows]``: the number of tokens that the step computes for each row.
        """

    def computed(self, compute: Callable[[], Any], pages: Any, model: Hashable) -> Any:
        """Return the result of ``compute`` on what the last `step` made and on ``pages``, or replay a recording of it.

        ``model`` identifies the weights, which must not move, and everything else that determines the computation. The
        result may have extra rows after the step's, and is valid until the next call.
        """

    def indices(self, values: NDArray[np.int64]) -> Any:
        """Convert tokens or row numbers to the form that the other functions take."""

    def fill_drawn(self, tokens: Any, drawn: Any) -> Any:
        """Replace each token ``-1 - row`` of `indices` by ``drawn[row]``, what the sampler drew in the step before.
        Returns the tokens.
        """

    def places(self, page: NDArray[np.int64], slot: NDArray[np.int64]) -> Any:
        """The destinations of the K and V of a step's tokens."""

    def fitted(self, pages: Any, layers: int, kv_heads: int, head_dim: int) -> Any:
        """The arena in the form that the other functions take. Raises ValueError if its pages have another shape."""

    def extent(self, pages: Any) -> tuple[int, int]:
        """The number of pages, and of tokens per page."""

    def take(self, x: Any, rows: Any) -> Any:
        """Gather rows by number."""

    def rms_norm(self, x: Any, weight: Any, eps: float, residual: Any | None = None) -> tuple[Any, Any]:
        """RMS norm of ``x`` plus ``residual``. Returns the normalised sum, and the sum."""

    def rope_table(self, frequencies: NDArray[np.float32], count: int) -> Any:
        """The angles of all positions below ``count``."""

    def rotation(self, table: Any, positions: NDArray[np.int64]) -> Any:
        """The angles of a step's tokens."""

    def rope_write_kv(
        self,
        qkv: Any,
        angles: Any,
        pages: Any,
        layer: int,
        places: Any,
        query_heads: int,
        bias: Any | None = None,
        norms: tuple[Any, Any] | None = None,
        eps: float = 0.0,
    ) -> Any:
        """Add a bias, normalise heads, rotate queries and keys, store keys and values, return the queries."""

    def linear(self, x: Any, weight: Any, widen: bool = False) -> Any:
        """A matrix product; with ``widen``, in float32 whatever the type of ``x``."""

    def silu_mul(self, gate_up: Any) -> Any:
        """The activation of the gate, times up."""

    def norm_linear(self, x: Any, norm: Any, eps: float, weight: Any, residual: Any | None = None) -> tuple[Any, Any]:
        """RMS norm, then a matrix product. Returns the product of the normalised sum, and the sum."""

    def norm_gated(self, x: Any, norm: Any, eps: float, weight: Any, residual: Any | None = None) -> tuple[Any, Any]:
        """As `norm_linear`, but returns the activation of the product's gate times up instead of the product."""

    def attention_plan(
        self,
        block_tables: NDArray[np.int64],
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64],
        pages: Any,
        query_heads: int,
    ) -> Any:
        """The metadata of a batch for `paged_attention`, shared by all layers."""

    def paged_attention(self, q: Any, pages: Any, layer: int, plan: Any, scale: float) -> Any:
        """Causal attention over the K and V in pages."""

    def copy_page(self, pages: Any, source: int, target: int) -> None:
        """Copy one page to another."""

    def zero_page(self, pages: Any, page: int) -> None:
        """Set a page to zero."""

"""What a backend computes, by name. `ops_numpy` and `ops_cupy.CupyOps` are backends; the first says what each means.

Arrays are the backend's own, and so are plans, places, angles and pages: a caller hands on what another function gave.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class Ops(Protocol):
    """A backend; module `ops_numpy` is one, and its docstrings have shapes and meanings."""

    def weight(self, tensor: NDArray[Any], dtype: str) -> Any:
        """A weight, given up by the caller, as the other functions take it.

        Raises ValueError when it cannot be of that type.
        """

    def step(self, lengths: NDArray[np.int64]) -> AbstractContextManager[None]:
        """Where `indices`, `places`, `rotation` and `attention_plan` are called: they go to a device together.

        ``lengths`` ``[rows]``: how many tokens of each row the step computes.
        """

    def computed(self, compute: Callable[[], Any], pages: Any, model: Hashable) -> Any:
        """Return what ``compute`` does, perhaps without calling it: of what the last `step` made, and of ``pages``.

        ``model`` stands for the weights, which stay where they are, and for whatever else tells what is computed. What
        is returned may have more rows than the step, behind the step's, and lasts until the next call.
        """

    def indices(self, values: NDArray[np.int64]) -> Any:
        """Tokens or rows as the other functions take them."""

    def places(self, page: NDArray[np.int64], slot: NDArray[np.int64]) -> Any:
        """Where the K and V of a step's tokens go."""

    def fitted(self, pages: Any, layers: int, kv_heads: int, head_dim: int) -> Any:
        """The arena as the other functions take it. Raises ValueError when it is not of such pages."""

    def extent(self, pages: Any) -> tuple[int, int]:
        """How many pages there are, and tokens in each."""

    def take(self, x: Any, rows: Any) -> Any:
        """Rows by their numbers."""

    def rms_norm(self, x: Any, weight: Any, eps: float, residual: Any | None = None) -> tuple[Any, Any]:
        """The normalised sum, and the sum."""

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
        """A product; float32 whatever the type of ``x`` when asked to ``widen``."""

    def silu_mul(self, gate_up: Any) -> Any:
        """The activation of the gate, times up."""

    def norm_linear(self, x: Any, norm: Any, eps: float, weight: Any, residual: Any | None = None) -> tuple[Any, Any]:
        """A product of the normalised sum, and the sum."""

    def norm_gated(self, x: Any, norm: Any, eps: float, weight: Any, residual: Any | None = None) -> tuple[Any, Any]:
        """The same, with the activation of the product's gate times up in its place."""

    def attention_plan(
        self,
        block_tables: NDArray[np.int64],
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64],
        pages: Any,
        query_heads: int,
    ) -> Any:
        """What `paged_attention` needs to know of a batch, the same for every layer."""

    def paged_attention(self, q: Any, pages: Any, layer: int, plan: Any, scale: float) -> Any:
        """Causal attention over the keys in pages."""

    def copy_page(self, pages: Any, source: int, target: int) -> None:
        """Make a page equal to another."""

    def zero_page(self, pages: Any, page: int) -> None:
        """Set a page to zero."""

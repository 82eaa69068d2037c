"""vLLM's KV cache on a GPU as blocks, and their copies to and from the daemon's pages there: one kernel for all layers,
on a stream of its own that waits for the steps before.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rocmforge.client.layout import PageLayout
from rocmforge.vllm.blocks.form import BlockInvalid, Form, units

THREADS = 256


class DeviceBlocks:
    """vLLM's blocks on one GPU, ``count`` of them: one tensor a layer. Raises BlockInvalid for another form."""

    def __init__(self, layers: Sequence[torch.Tensor], layout: PageLayout, block_size: int, count: int) -> None:
        import cupy

        self._form = Form.of(layers[0], layout, block_size, count)
        self.order = self._form.order
        for layer in layers:
            if layer.shape != layers[0].shape or layer.stride() != layers[0].stride():
                raise BlockInvalid("the layers' KV caches differ in shape")
        self._page_size, self._block_size = layout.page_size, block_size
        self._bytes = layout.page_bytes // layout.page_size
        self._device = layers[0].device
        self._layers = torch.tensor([layer.data_ptr() for layer in layers], dtype=torch.int64, device=self._device)
        self._sides = torch.tensor([self._form.page, self._form.block], dtype=torch.int64, device=self._device)
        self._kept = list(layers)
        self.stream = torch.cuda.Stream(self._device)
        with cupy.cuda.Device(self._device.index or 0):
            text = Path(__file__).with_name("move.hip").read_text(encoding="utf-8")
            self._kernel = cupy.RawModule(code=text, options=("-std=c++17",)).get_function("move_units")
            self._queue = cupy.cuda.ExternalStream(self.stream.cuda_stream, self._device.index or 0)
        self._cupy = cupy
        self._pages: int | None = None

    def attach(self, pages: Any) -> None:
        """Take the pages of a session, ``rocmforge.client.DevicePages``."""
        self._pages = pages.pointer

    def detach(self) -> None:
        """Keep nothing of them: what was copied has been waited for."""
        self._pages = None

    def mark(self) -> Any:
        """All that vLLM has put on its stream so far."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def load(self, table: Sequence[int], start: int, stop: int, blocks: Sequence[int], after: Any) -> int:
        """Copy tokens [start, stop) of a block table into blocks; returns the bytes."""
        return self._move(table, start, stop, blocks, after, saves=False)

    def save(self, table: Sequence[int], start: int, stop: int, blocks: Sequence[int], after: Any) -> int:
        """Copy tokens [start, stop) from blocks into the pages of a block table; returns the bytes."""
        return self._move(table, start, stop, blocks, after, saves=True)

    def _move(
        self, table: Sequence[int], start: int, stop: int, blocks: Sequence[int], after: Any, *, saves: bool
    ) -> int:
        places = units(table, start, stop, blocks, self._page_size, self._block_size)
        self.launch(places, after, saves=saves)
        self.stream.synchronize()  # lets go of the interpreter; the bytes have arrived
        return (stop - start) * self._bytes

    def launch(self, places: NDArray[np.int64], after: Any, *, saves: bool) -> None:
        """Put a copy of units (`form.units`) on ``stream`` after ``after``. Raises RuntimeError without a session."""
        if self._pages is None:
            raise RuntimeError("no session's pages are attached")
        form, ordinal = self._form, self._device.index or 0
        with torch.cuda.device(self._device), torch.cuda.stream(self.stream), self._cupy.cuda.Device(ordinal):
            self.stream.wait_event(after)
            where = torch.from_numpy(places).to(self._device)
            counts = (len(self._kept), form.kvs, form.heads, form.slots, form.vectors, int(saves))
            pointers = (self._pages, self._layers.data_ptr(), where.data_ptr(), self._sides.data_ptr())
            self._kernel(
                (len(places) * len(self._kept),),
                (THREADS,),
                (*map(np.intp, pointers), *map(np.int32, counts)),
                stream=self._queue,
            )

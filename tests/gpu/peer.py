"""An engine as far as its memory goes, in a process of its own: one session on a GPU, told what to do line by line.

    python -m tests.gpu.peer ADDRESS DEVICE POOL_PAGES TTL

Reads a JSON list a line, the name of a command and its arguments, and answers with one JSON value a line: what the
command returns, or ``{"error": reason, "message": ...}``.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import numpy as np

from rocmforge.client import cache
from rocmforge.client.arena.device import DevicePages
from rocmforge.client.arena.gpu_ipc import Runtime
from services.common.errors import ServiceError
from services.common.logs import configure_logging
from services.engine.pages.daemon import GrpcPageSource
from services.engine.pages.source import Demand, Opening, PageLayout

#: ROCMFORGE_TEST_PAGE_SIZE: pages so large that the most a pool may have are more than any GPU's memory.
GEOMETRY = PageLayout(
    int(os.environ.get("ROCMFORGE_TEST_PAGE_SIZE", "16")), layers=2, kv_heads=2, head_dim=64, dtype="f16"
)
POOL = "gpu test"


class Peer:
    """The commands."""

    def __init__(self, address: str, device: int, pages: int | None, ttl_s: float) -> None:
        gpu = Runtime.load().gpu(device)
        self._source = GrpcPageSource(address, POOL, GEOMETRY, pool_pages=pages, ttl_s=ttl_s, gpu=gpu)

    def open(self) -> dict[str, Any]:
        self._source.reopen()
        pages = self._pages()
        return {"epoch": self._source.epoch, "pages": pages.total_pages, "id": pages.gpu.id}

    def _pages(self) -> DevicePages:
        pages = self._source.memory
        if not isinstance(pages, DevicePages):
            raise TypeError
        return pages

    def write(self, page: int, byte: int) -> None:
        """Fill a page, through CuPy's view of all of them."""
        view = self._pages().array
        view[page].set(np.full(view.shape[1], byte, np.uint8))
        self._pages().gpu.synchronize()

    def read(self, page: int) -> list[int]:
        """The values that a page is made of."""
        return [int(value) for value in np.unique(self._pages().array[page].get())]

    def allocate(self, name: str, pages: int) -> list[int]:
        demand = Demand(name, start=0, tokens=[], total_pages=pages, known_pages=0, opening=Opening([1]))
        [grant] = self._source.exchange([demand], []).result()
        if grant.error is not None:
            raise grant.error
        return list(grant.pages)

    def may_launch(self) -> bool:
        return self._source.may_launch()

    def close(self) -> None:
        self._source.close()


def main() -> None:
    address, device, pages, ttl_s = sys.argv[1:]
    configure_logging()
    # What is tested is whose the memory is, not how soon a busy machine answers.
    cache.MAX_CALL_S = cache.CLOSE_S = 60.0
    peer = Peer(address, int(device), int(pages) or None, float(ttl_s))
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            answer = getattr(peer, name)(*arguments)
        except ServiceError as error:
            answer = {"error": error.reason, "message": error.message}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()

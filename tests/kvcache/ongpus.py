"""A daemon in this process whose pages are on the GPUs of a fake machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from kernels.device.checksum import reference
from rocmforge.client.arena.gpu_ipc import Gpu
from rocmforge.kvcache.v1 import kvcache_pb2 as pb
from tests.fakegpu import FakeRuntime, Machine
from tests.kvcache.conftest import LAYOUT_PB, Running


def read_checksums(gpu: Gpu, pointer: int, page_bytes: int, pages: list[int]) -> list[int]:
    """What the kernel does, of memory that is no GPU's."""
    read = [np.frombuffer(gpu.read(pointer + page * page_bytes, page_bytes), np.uint8) for page in pages]
    return [int(one) for one in reference(np.stack(read))]


#: Bytes of a page of LAYOUT_PB, and of the canaries behind the pages.
PAGE = 2 * 4 * 4 * 4
CANARIES = 256 * 64


class OnGpus(Running):
    """A daemon on a fake machine's GPUs; ``api`` is what it calls, ``machine`` what other processes share."""

    def __init__(self, directory: Path, *flags: str, total: int = 1 << 20) -> None:
        self.machine = Machine(total=total)
        self.api: FakeRuntime = self.machine.process()
        super().__init__(
            directory, "--device", "gpu", *flags, load_runtime=self.api.runtime, read_checksums=read_checksums
        )

    def open(self, device: int | None = 0, pid: int | None = None, **fields: Any) -> pb.OpenSessionResponse:
        fields = {"pool_id": "pool", "layout": LAYOUT_PB, "pool_pages": 8, **fields}
        process = None if pid is None else pb.ProcessIdentity(pid=pid, start_time=1, pid_namespace="elsewhere")
        return self.stub.OpenSession(pb.OpenSessionRequest(device_ordinal=device, process=process, **fields))

    def attach(self, opened: pb.OpenSessionResponse) -> Gpu:
        """As an engine does, which stays mapped."""
        arena = opened.arena
        gpu = self.machine.process().gpu(arena.device_ordinal)
        at = gpu.open(arena.device_ipc_handle) + arena.canary_offset
        seen = gpu.read(at, 32)
        gpu.write(at + 32, bytes(byte ^ 0xFF for byte in seen))
        self.stub.AttachSession(pb.AttachSessionRequest(session_id=opened.session_id, seen=seen))
        return gpu

    def end(self, opened: pb.OpenSessionResponse) -> None:
        self.stub.CloseSession(pb.CloseSessionRequest(session_id=opened.session_id))

    def arena_bytes(self, pages: int = 8) -> int:
        return pages * PAGE + CANARIES

"""A daemon as far as its mover goes, on a GPU: pages go to pinned host memory and back.

    python -m tests.gpu.moving FOLDER ORDINAL

Prints a JSON object of what was seen.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from rocmforge.client.arena.gpu_ipc import Runtime
from services.kvcache.mover.orders import Attached, AttachFile, AttachGpu, FillFromHost, Read
from tests.kvcache.mover.rig import ARENA, HOST, PAGE_BYTES, PAGES, Rig

GPU = 3


async def moved(folder: Path, ordinal: int) -> dict[str, Any]:
    gpu = Runtime.load().gpu(ordinal)
    pointer = gpu.allocate(PAGES * PAGE_BYTES)
    pages = [os.urandom(PAGE_BYTES) for _ in range(PAGES)]
    gpu.write(pointer, b"".join(pages))
    gpu.synchronize()
    attach = AttachGpu(GPU, gpu.export(pointer), ordinal, gpu.id, PAGE_BYTES, PAGES)
    seen: dict[str, Any] = {}
    async with Rig(folder) as rig:
        await rig.detached(HOST)
        rig.replies.clear()
        rig.mover.attach(AttachFile(HOST, str(rig.host.path), PAGE_BYTES, PAGES, pin_for=ordinal))
        pinned = await rig.reply(Attached, HOST)
        rig.mover.attach(attach)
        opened = await rig.reply(Attached, GPU)
        seen["attached"] = [pinned.ok, pinned.detail, opened.ok, opened.detail]

        # All at once: the mover begins every copy before it awaits the first.
        for page in range(PAGES // 2):
            assert rig.mover.send(Read(page, GPU, page, HOST, page))
        await rig.until(lambda: not rig.mover._jobs.oldest())
        seen["out"] = [rig.host[page] == pages[page] for page in range(PAGES // 2)]
        half = PAGES // 2
        for page in range(half):
            assert rig.mover.send(FillFromHost(100 + page, GPU, half + page, HOST, page))
        await rig.until(lambda: not rig.mover._jobs.oldest())
        back = gpu.read(pointer, PAGES * PAGE_BYTES)
        seen["back"] = back == b"".join(pages[:half] * 2)

        # From host pages, which are not pinned, too; not between GPUs.
        seen["from file"] = (await rig.filled(FillFromHost(200, GPU, 0, ARENA, 5), 200)).outcome
        seen["first page"] = gpu.read(pointer, PAGE_BYTES) == rig.arena[5]
        seen["gpu to gpu"] = (await rig.filled(FillFromHost(201, GPU, 0, GPU, 1), 201)).outcome

        # A mover that was killed is replaced, and opens both again.
        assert rig.mover.pid
        os.kill(rig.mover.pid, signal.SIGKILL)
        await rig.until(lambda: len(rig.of(Attached, GPU)) == 2 and len(rig.of(Attached, HOST)) == 2)
        seen["attached again"] = rig.of(Attached, GPU)[-1].ok and rig.of(Attached, HOST)[-1].ok
        seen["again"] = (await rig.read(Read(300, GPU, 3, HOST, 9), 300)).ok and rig.host[9] == pages[3]

        wrong = AttachGpu(9, gpu.export(pointer), ordinal, "0000:ff:00.0", PAGE_BYTES, PAGES)
        rig.mover.attach(wrong)
        seen["another GPU"] = (await rig.reply(Attached, 9)).detail
        rig.mover.attach(AttachGpu(10, bytes(64), ordinal, gpu.id, PAGE_BYTES, PAGES))
        seen["no handle"] = (await rig.reply(Attached, 10)).ok
        for memory in (GPU, HOST):
            await rig.detached(memory)
        seen["after"] = (await rig.read(Read(400, GPU, 3, HOST, 9), 400)).ok
        seen["restarts"] = rig.mover.restarts
    gpu.free(pointer)
    return seen


if __name__ == "__main__":
    from services.common.logs import configure_logging

    configure_logging()
    print(json.dumps(asyncio.run(moved(Path(sys.argv[1]), int(sys.argv[2])))))

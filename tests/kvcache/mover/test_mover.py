"""The mover as a process: pages that are copied, and every way in which it can fail."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from crc32c import crc32c

from services.kvcache.mover import process
from services.kvcache.mover.child import environment
from services.kvcache.mover.orders import (
    Attached,
    AttachFile,
    Chain,
    Commit,
    Detached,
    Filled,
    FillFromHost,
    Lookup,
    Order,
    Read,
    ReadDone,
)
from tests.kvcache.mover.rig import ARENA, HOST, PAGE_BYTES, PAGES, Rig, chain_of

pytestmark = pytest.mark.timeout(120)


async def test_a_page_goes_to_a_slot_and_back_into_another_page(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        page = rig.arena[3]
        done = await rig.read(Read(1, ARENA, 3, HOST, 7, checksum=True), 1)
        assert done.ok and done.checksum == crc32c(page) and rig.host[7] == page
        filled = await rig.filled(FillFromHost(2, ARENA, 9, HOST, 7, done.checksum), 2)
        assert (filled.outcome, filled.bytes) == ("filled", PAGE_BYTES)
        assert rig.arena[9] == page
        assert rig.lost == []
    assert rig.lost == [[]]


async def test_a_slot_that_changed_is_refused_and_reaches_no_page(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        done = await rig.read(Read(1, ARENA, 3, HOST, 7, checksum=True), 1)
        before = rig.arena[9]
        rig.host[7] = b"x" + rig.host[7][1:]
        assert (await rig.filled(FillFromHost(2, ARENA, 9, HOST, 7, done.checksum), 2)).outcome == "refused"
        assert rig.arena[9] == before


@pytest.mark.parametrize(
    ("order", "words"),
    [
        (Read(1, 5, 0, HOST, 0), "memory 5 is not attached"),
        (Read(1, ARENA, PAGES, HOST, 0), f"page {PAGES} of memory"),
        (Read(1, ARENA, 0, HOST, PAGES), f"page {PAGES} of memory"),
        (Read(1, ARENA, 0), "nowhere"),
        (Read(1, ARENA, 0, outer=chain_of(1)), "no outer tier"),
        (Read(1, ARENA, 0, 5, 0), "memory 5"),
    ],
)
async def test_a_read_that_cannot_be_says_why(tmp_path: Path, order: Read, words: str) -> None:
    async with Rig(tmp_path) as rig:
        done = await rig.read(order, 1)
        assert not done.ok and words in done.detail
        assert (await rig.read(Read(2, ARENA, 0, HOST, 0), 2)).ok


async def test_a_fill_that_cannot_be_says_why(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        for job, order in enumerate((FillFromHost(0, ARENA, PAGES, HOST, 0), FillFromHost(1, 9, 0, HOST, 0))):
            filled = await rig.filled(order, job)
            assert filled.outcome == "failed" and filled.detail
        assert (await rig.found(Lookup(3, (bytes(32),)), 3)).count == 0


async def test_many_jobs_at_once_are_each_answered_once(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        pages = [rig.arena[page] for page in range(PAGES)]
        for job in range(500):
            assert rig.mover.send(Read(job, ARENA, job % PAGES, HOST, job % PAGES))
        await rig.until(lambda: sum(isinstance(reply, ReadDone) for reply in rig.replies) == 500)
        assert [rig.host[page] for page in range(PAGES)] == pages
        assert len({reply.job for reply in rig.replies if isinstance(reply, ReadDone)}) == 500


async def test_what_is_in_flight_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "MOST_JOBS", 10)
    async with Rig(tmp_path) as rig:
        assert rig.mover.pid
        os.kill(rig.mover.pid, signal.SIGSTOP)
        taken = [rig.mover.send(Read(job, ARENA, 0, HOST, 0)) for job in range(20)]
        assert taken == [True] * 10 + [False] * 10
        os.kill(rig.mover.pid, signal.SIGCONT)
        await rig.until(lambda: len([reply for reply in rig.replies if isinstance(reply, ReadDone)]) == 10)
        assert rig.mover.send(Read(20, ARENA, 0, HOST, 0))
        await rig.reply(ReadDone, 20)


async def test_a_stopped_mover_does_not_hold_the_loop(tmp_path: Path) -> None:
    """More than the socket takes is written, and other work goes on."""
    async with Rig(tmp_path) as rig:
        assert rig.mover.pid
        os.kill(rig.mover.pid, signal.SIGSTOP)
        loop = asyncio.get_running_loop()
        longest = 0.0
        for job in range(80):
            begun = loop.time()
            rig.mover.send(Lookup(job, (bytes(32),) * 4096))
            await asyncio.sleep(0)
            longest = max(longest, loop.time() - begun)
        assert longest < 1.5
        assert not rig.mover.send(Lookup(99, (bytes(32),) * 4096)), "8 MiB wait already"
        os.kill(rig.mover.pid, signal.SIGCONT)
        await rig.until(lambda: len(rig.replies) > 10)


@pytest.mark.parametrize("reply", [Commit(5), Commit(1)])
async def test_a_commit_of_nothing_is_not_sent(tmp_path: Path, reply: Order) -> None:
    async with Rig(tmp_path) as rig:
        await rig.read(Read(1, ARENA, 0, HOST, 0), 1)
        assert not rig.mover.send(reply)


async def test_a_killed_mover_is_replaced_and_its_jobs_are_lost_once(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        first = rig.mover.pid
        assert first
        os.kill(first, signal.SIGSTOP)
        for job in (1, 2, 3):
            assert rig.mover.send(Read(job, ARENA, 0, HOST, job))
        await asyncio.sleep(0)
        os.kill(first, signal.SIGKILL)
        await rig.ready_again(1)
        assert rig.lost == [[1, 2, 3]]
        assert rig.mover.pid != first and not Path(f"/proc/{first}").exists()
        assert (await rig.read(Read(4, ARENA, 5, HOST, 5), 4)).ok
        assert rig.host[5] == rig.arena[5]


async def test_a_stopped_mover_is_killed_and_its_jobs_are_lost_after_it_is_gone(tmp_path: Path) -> None:
    gone: list[bool] = []
    async with Rig(tmp_path, silence_s=1.0) as rig:
        first = rig.mover.pid
        lose = rig.mover._on_lost

        def lost(jobs: Any) -> None:
            gone.append(not Path(f"/proc/{first}").exists())
            lose(jobs)

        rig.mover._on_lost = lost
        assert first
        os.kill(first, signal.SIGSTOP)
        assert rig.mover.send(FillFromHost(1, ARENA, 0, HOST, 0))
        await rig.ready_again(1)
        assert rig.lost == [[1]] and gone == [True]
        assert rig.of(Filled, 1) == []


async def test_a_stopped_mover_is_killed_also_when_it_has_nothing_to_do(tmp_path: Path) -> None:
    async with Rig(tmp_path, silence_s=1.0) as rig:
        assert rig.mover.pid
        os.kill(rig.mover.pid, signal.SIGSTOP)
        await rig.ready_again(1)
        assert rig.lost == [[]]


async def test_a_mover_that_answers_is_not_killed_for_being_idle(tmp_path: Path) -> None:
    async with Rig(tmp_path, silence_s=1.0) as rig:
        first, loop = rig.mover.pid, asyncio.get_running_loop()
        end = loop.time() + 2.5
        await rig.until(lambda: loop.time() > end)
        assert rig.mover.pid == first and rig.mover.restarts == 0


async def test_replacements_come_slower_and_slower(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        loop = asyncio.get_running_loop()
        waits = []
        for kills in range(1, 5):
            assert rig.mover.pid
            os.kill(rig.mover.pid, signal.SIGKILL)
            await rig.until(lambda kills=kills: len(rig.lost) >= kills)
            begun = loop.time()
            await rig.until(lambda kills=kills: rig.mover.restarts >= kills and rig.mover.running)
            waits.append(loop.time() - begun)
        assert waits[3] > 0.7 and waits[3] > waits[0]


async def test_a_memory_is_detached_when_the_mover_says_so_or_is_gone(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        assert rig.mover.pid
        mapped = Path(f"/proc/{rig.mover.pid}/maps")
        assert str(rig.arena.path) in mapped.read_text()
        await rig.detached(ARENA)
        assert str(rig.arena.path) not in mapped.read_text()
        assert not (await rig.read(Read(1, ARENA, 0, HOST, 0), 1)).ok

        first = rig.mover.pid
        os.kill(first, signal.SIGSTOP)
        rig.mover.detach(HOST)
        assert rig.of(Detached, HOST) == []
        os.kill(first, signal.SIGKILL)
        await rig.reply(Detached, HOST)
        assert not Path(f"/proc/{first}").exists()
        await rig.until(lambda: rig.mover.running)
        assert (await rig.read(Read(2, HOST, 0, HOST, 0), 2)).detail == "memory 2 is not attached"


async def test_a_file_is_mapped_only_if_it_is_trusted_and_long_enough(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        link = tmp_path / "link.arena"
        link.symlink_to(rig.arena.path)
        os.mkfifo(tmp_path / "pipe")
        refused = {
            "a link": AttachFile(10, str(link), PAGE_BYTES, PAGES),
            "too short": AttachFile(11, str(rig.arena.path), PAGE_BYTES, PAGES + 1),
            "absent": AttachFile(12, str(tmp_path / "absent"), PAGE_BYTES, PAGES),
            "a pipe": AttachFile(13, str(tmp_path / "pipe"), PAGE_BYTES, PAGES),
            "known": AttachFile(ARENA, str(rig.arena.path), PAGE_BYTES, PAGES),
        }
        for what, order in refused.items():
            rig.replies.clear()
            rig.mover.attach(order)
            answer = await rig.reply(Attached, order.memory)
            assert not answer.ok and answer.detail, what


@pytest.mark.needs("other-users")
async def test_a_file_of_another_user_is_not_mapped(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        other = tmp_path / "other.arena"
        other.write_bytes(bytes(PAGE_BYTES))
        os.chown(other, 12345, 12345)
        rig.mover.attach(AttachFile(10, str(other), PAGE_BYTES, 1))
        answer = await rig.reply(Attached, 10)
        assert not answer.ok and "12345" in answer.detail


async def test_nonsense_on_the_socket_ends_the_mover_and_the_daemon_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async with Rig(tmp_path) as rig:
        assert rig.mover._child
        rig.mover._child.write(b"\xff\xff\xff\xff nonsense")
        await rig.ready_again(1)
        assert (await rig.read(Read(1, ARENA, 0, HOST, 0), 1)).ok
        rig.mover._child.data_received(b"\0\0\0\0")
        await rig.ready_again(2)
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
    assert any(line["event"] == "invalid_order" for line in lines)


async def test_a_reply_to_no_job_ends_the_mover(tmp_path: Path) -> None:
    from services.kvcache.mover.frames import encode

    async with Rig(tmp_path) as rig:
        assert rig.mover._child
        rig.mover._child.data_received(encode([Filled(77, "filled", 1, 0.0)]))
        await rig.ready_again(1)
        assert rig.of(Filled, 77) == []


async def test_the_mover_dies_with_its_daemon(tmp_path: Path) -> None:
    """Also while it is stopped, when it reads no end of file."""
    code = (
        "import asyncio, os, sys, signal\n"
        "from services.common.logs import configure_logging\n"
        "from services.kvcache.mover.process import Mover\n"
        "configure_logging()\n"
        "async def main():\n"
        "    mover = Mover(None, 1 << 20, print, print)\n"
        "    await mover.start()\n"
        "    print(mover.pid, flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    for stopped in (False, True):
        daemon = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )
        assert daemon.stdout
        pid = int(await daemon.stdout.readline())
        end = os.pidfd_open(pid)
        if stopped:
            async with asyncio.timeout(20):  # until it has said that it dies with its parent
                while b"mover" not in Path(f"/proc/{pid}/cmdline").read_bytes() or not _ignores(pid, signal.SIGTERM):
                    await asyncio.sleep(0.01)
            os.kill(pid, signal.SIGSTOP)
        daemon.kill()
        await daemon.wait()
        gone = asyncio.Event()
        asyncio.get_running_loop().add_reader(end, gone.set)
        async with asyncio.timeout(20):
            await gone.wait()
        asyncio.get_running_loop().remove_reader(end)
        os.close(end)


def _ignores(pid: int, number: int) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    [ignored] = [int(line.split()[1], 16) for line in lines if line.startswith("SigIgn")]
    return bool(ignored >> (number - 1) & 1)


async def test_a_signal_to_the_group_is_left_to_the_daemon(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        assert rig.mover.pid
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(rig.mover.pid, number)
        assert (await rig.read(Read(1, ARENA, 0, HOST, 0), 1)).ok
        assert rig.mover.restarts == 0


async def test_it_inherits_no_descriptor_and_little_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROCMFORGE_SECRET", "1")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "1")
    with (tmp_path / "open").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        async with Rig(tmp_path) as rig:
            open_files = [os.readlink(entry) for entry in Path(f"/proc/{rig.mover.pid}/fd").iterdir()]
            assert str(tmp_path / "open") not in open_files
            assert sum(name.startswith("socket:") for name in open_files) == 1
            inherited = Path(f"/proc/{rig.mover.pid}/environ").read_text()
            assert "SECRET" not in inherited and "PATH=" in inherited
    assert environment({"HIP_VISIBLE_DEVICES": "1", "A": "2"}) == {"HIP_VISIBLE_DEVICES": "1"}


async def test_without_the_outer_tier_none_of_its_libraries_is_loaded(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        assert (await rig.read(Read(1, ARENA, 0, HOST, 0), 1)).ok
        maps = Path(f"/proc/{rig.mover.pid}/maps").read_text()
        for library in ("glide", "crc32c", "cryptography", "cupy", "grpc", "numpy"):
            assert library not in maps.replace(str(tmp_path), ""), library


async def test_a_close_reaps_the_mover_and_loses_what_it_had(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    async with rig:
        pid = rig.mover.pid
        assert pid
        os.kill(pid, signal.SIGSTOP)
        assert rig.mover.send(Read(1, ARENA, 0, HOST, 0, outer=Chain(bytes(32), bytes(32), bytes(4))))
        await asyncio.sleep(0)
    assert rig.lost == [[1]] and not Path(f"/proc/{pid}").exists()
    assert not rig.mover.running and not rig.mover.send(Read(2, ARENA, 0, HOST, 0))
    rig.mover.detach(HOST)
    await rig.reply(Detached, HOST)

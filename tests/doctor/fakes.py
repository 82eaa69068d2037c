"""A machine made of dicts."""

from __future__ import annotations

import dataclasses
import errno
import fnmatch
import json
import stat
from collections.abc import Sequence
from typing import Any

from services.common.edge.listener import Listener
from services.doctor.machine import Machine, Node, Ran
from services.doctor.stack import GpuFacts, Stack

FOLDER, DEVICE, SOCKET, FILE = stat.S_IFDIR, stat.S_IFCHR, stat.S_IFSOCK, stat.S_IFREG

#: What ROCm's wheel says on a machine with one MI300X and all in order.
MI300 = GpuFacts(0, "0000:03:00.0", "AMD Instinct MI300X", "gfx942", 180 << 30, 192 << 30)
ROCM = Stack(cupy="14.2.0", is_hip=True, build=70051831, runtime=70051831, driver=70051831, gpus=(MI300,))
H200 = GpuFacts(0, "0000:01:00.0", "NVIDIA H200", "sm_90", 130 << 30, 139 << 30)
CUDA = Stack(cupy="14.2.0", build=13000, runtime=13000, driver=13000, gpus=(H200,))


class FakeMachine(Machine):
    """Everything is there and allowed unless said otherwise; ``ran`` answers programs by a word of their command."""

    def __init__(self, **environ: str) -> None:
        super().__init__({"PATH": "/usr/bin", "HOME": "/home/user", **environ})
        self.uid, self.gids = 1000, frozenset({1000, 27})
        self.nodes: dict[str, Node] = {}
        self.texts: dict[str, str] = {}
        self.links: dict[str, str] = {}
        self.opening: dict[str, int] = {}
        self.read_only: set[str] = set()
        self.spaces: tuple[int, int] = (8 << 30, 16 << 30)
        self.files = 1 << 20
        self.programs: dict[str, str] = {}
        self.connecting: dict[str, int] = {}
        self.binding: dict[str, int] = {}
        self.serving: dict[str, str] = {}
        self.certificates: dict[str, bytes] = {}
        self.pages: dict[str, str] = {}
        self.ran: dict[str, Ran] = {}
        self.commands: list[list[str]] = []
        self.folder("/", uid=0)

    def folder(self, *paths: str, mode: int = 0o755, uid: int = 1000) -> FakeMachine:
        for path in paths:
            self.nodes[path] = Node(FOLDER | mode, uid, uid)
        return self

    def device(self, *paths: str, gid: int = 992, opening: int = 0) -> FakeMachine:
        for path in paths:
            self.nodes[path] = Node(DEVICE | 0o660, 0, gid)
            self.opening[path] = opening
        return self

    def amd(self) -> FakeMachine:
        return self.device("/dev/kfd", "/dev/dri/renderD128", "/dev/dri/renderD129")

    def nvidia(self) -> FakeMachine:
        return self.device("/dev/nvidia0", gid=0)

    def process(self, number: int | str, environ: dict[str, str] | None = None, /, **namespaces: str) -> FakeMachine:
        self.folder(f"/proc/{number}")
        for kind, name in {"ipc": "1", "pid": "1", "net": "1", **namespaces}.items():
            if name:
                self.links[f"/proc/{number}/ns/{kind}"] = f"{kind}:[{name}]"
        if environ is not None:
            self.texts[f"/proc/{number}/environ"] = "\0".join(f"{name}={value}" for name, value in environ.items())
        return self

    def prints(self, word: str, told: Any) -> FakeMachine:
        self.ran[word] = Ran(0, json.dumps(told), "")
        return self

    def stack(self, stack: Stack) -> FakeMachine:
        return self.prints("probe", dataclasses.asdict(stack))

    # --- what is asked ---

    def glob(self, pattern: str) -> list[str]:
        return sorted(fnmatch.filter(self.nodes, pattern))

    def stat(self, path: str) -> Node | None:
        return self.nodes.get(path)

    def text(self, path: str) -> str | None:
        return self.texts.get(path)

    def link(self, path: str) -> str | None:
        return self.links.get(path)

    def open_errno(self, path: str) -> int:
        return self.opening.get(path, errno.ENOENT)

    def may_write(self, path: str) -> bool:
        return path in self.nodes and path not in self.read_only

    def space(self, path: str) -> tuple[int, int]:
        return self.spaces

    def open_files(self) -> int:
        return self.files

    def which(self, program: str) -> str | None:
        return self.programs.get(program)

    def connect_errno(self, listener: Listener) -> int:
        return self.connecting.get(str(listener), errno.ENOENT)

    def bind_errno(self, listener: Listener) -> int:
        return self.binding.get(str(listener), 0)

    def serves(self, listener: Listener, service: str) -> bool:
        return self.serving.get(str(listener)) == service

    def certificate(self, listener: Listener) -> bytes:
        return self.certificates.get(str(listener), b"")

    def metrics(self, listener: Listener) -> str:
        return self.pages.get(str(listener), "")

    def run(self, command: Sequence[str], limit_s: float) -> Ran:
        self.commands.append(list(command))
        [found] = [ran for word, ran in self.ran.items() if any(word in part for part in command)]
        return found

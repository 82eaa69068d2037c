"""``python -m tests.kvcache.clients.stranger UID ADDRESS``: a client of the daemon that is another user.

Each line of its input is a method and a request in JSON, each line of its output the response, or the code, the reason
and the message of the error. What it needs is imported before it gives root up: the interpreter's files may be root's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc
from google.protobuf import json_format

from rocmforge.kvcache.v1 import kvcache_pb2 as pb
from rocmforge.kvcache.v1 import kvcache_pb2_grpc
from services.common import rpc
from services.common.access.identity import Identity
from tests.processes import ROOT

SERVICE = pb.DESCRIPTOR.services_by_name["KvCacheService"]


def main() -> None:
    """Answer until the input ends."""
    uid, address = int(sys.argv[1]), sys.argv[2]
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    with grpc.insecure_channel(address) as channel:
        stub = kvcache_pb2_grpc.KvCacheServiceStub(channel)
        for line in sys.stdin:
            method, body = json.loads(line)
            print(json.dumps(_answer(stub, method, body)), flush=True)


def _answer(stub: Any, method: str, body: dict[str, Any]) -> dict[str, Any]:
    name = SERVICE.methods_by_name[method].input_type.name
    try:
        response = getattr(stub, method)(json_format.ParseDict(body, getattr(pb, name)()), timeout=30)
    except grpc.RpcError as failure:
        error = rpc.error_from(failure)
        return {"code": error.code, "reason": error.reason, "message": error.message, **error.metadata}
    found: dict[str, Any] = json_format.MessageToDict(response)
    return found


class Stranger:
    """Such a process, for as long as a block lasts."""

    def __init__(self, uid: int, address: str) -> None:
        self.identity = Identity.of_uid(uid)
        self._uid = uid
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.kvcache.clients.stranger", str(uid), address],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def start_time(self) -> int:
        return int(Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[19])

    def may_open(self, path: Path) -> bool:
        """Whether a process of this user can open a file for writing."""
        script = f"import os\nos.setgroups([])\nos.setresuid(*[{self._uid}] * 3)\nopen({str(path)!r}, 'r+b')"
        return subprocess.run([sys.executable, "-c", script], stderr=subprocess.DEVNULL, timeout=60).returncode == 0

    def ask(self, method: str, **body: Any) -> dict[str, Any]:
        """One call."""
        process = self._process
        if process.stdin is None or process.stdout is None:
            raise AssertionError("no pipes")
        process.stdin.write(json.dumps([method, body]) + "\n")
        process.stdin.flush()
        answer: dict[str, Any] = json.loads(process.stdout.readline())
        return answer

    def __enter__(self) -> Stranger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(60)
        if self._process.stdout is not None:
            self._process.stdout.close()


if __name__ == "__main__":
    main()

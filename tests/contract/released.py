"""The protocol of an older release, 0.1.0: its messages, and a service that knows no more."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool

#: What `make release-protos` had recorded for it.
OLDER = Path(__file__).parent / "0.1.0.binpb"
SERVICE = "rocmforge.kvcache.v1.KvCacheService"


def pool() -> DescriptorPool:
    """The released descriptors, apart from those of the generated code."""
    found = DescriptorPool()
    for file in FileDescriptorSet.FromString(OLDER.read_bytes()).file:
        found.Add(file)
    return found


RELEASED = pool()


def message(name: str) -> Any:
    """The released class of a message of the daemon's protocol."""
    return message_factory.GetMessageClass(RELEASED.FindMessageTypeByName(f"rocmforge.kvcache.v1.{name}"))


def known(kind: Any, data: bytes) -> bytes:
    """What of a message a release knows: a field that it does not know is dropped."""
    parsed = kind.FromString(data)
    parsed.DiscardUnknownFields()
    return bytes(parsed.SerializeToString())


class _Relay(grpc.GenericRpcHandler):
    """Passes on the released methods, and of their messages the released fields; ``passed`` are the methods called."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel
        self._methods = RELEASED.FindServiceByName(SERVICE).methods_by_name
        self.passed = set[str]()

    def service(self, handler_call_details: Any) -> Any:
        path = handler_call_details.method
        service, _, name = path[1:].partition("/")
        if service != SERVICE or name not in self._methods:
            return None
        method = self._methods[name]
        asked, told = (message_factory.GetMessageClass(one) for one in (method.input_type, method.output_type))

        def call(data: bytes, context: grpc.ServicerContext) -> bytes:
            self.passed.add(name)
            try:
                return known(
                    told, self._channel.unary_unary(path)(known(asked, data), timeout=context.time_remaining())
                )
            except grpc.RpcError as error:
                context.set_trailing_metadata(error.trailing_metadata())
                context.abort(error.code(), error.details())
                raise  # never reached: abort raises

        return None if method.server_streaming else grpc.unary_unary_rpc_method_handler(call)


@contextlib.contextmanager
def released_daemon(address: str, socket: Path) -> Iterator[set[str]]:
    """A daemon that knows the released protocol alone, on ``socket``: the one at ``address``, through a relay.

    Yields the names of the methods that were called.
    """
    with grpc.insecure_channel(address) as channel, ThreadPoolExecutor(8) as threads:
        server, relay = grpc.server(threads), _Relay(channel)
        server.add_generic_rpc_handlers((relay,))
        server.add_insecure_port(f"unix:{socket}")
        server.start()
        try:
            yield relay.passed
        finally:
            server.stop(None).wait()

"""Server reflection (grpc.reflection.v1 and v1alpha), for clients without the proto files.

grpcio-reflection implements only v1alpha, cannot look up methods, and drops the JSON names that protoc assigns to
fields. Only its messages are used here; those of v1 have the same fields, in a package of another name.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Any

import grpc
from google.protobuf import text_format
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)
from google.protobuf.descriptor_pool import Default
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2
from grpc_reflection.v1alpha import reflection_pb2

V1 = "grpc.reflection.v1.ServerReflection"
V1ALPHA = "grpc.reflection.v1alpha.ServerReflection"

#: Maximum number of requests per call; a client with more opens another call.
MAX_REQUESTS = 1000
#: Size limit of one request in bytes. The response echoes the request, and no name is that long.
MAX_REQUEST_BYTES = 4096

_METHOD = "ServerReflectionInfo"
#: These are packed into error details: no service's file depends on them, so clients look them up by name.
_DETAILS = (error_details_pb2.DESCRIPTOR, code_pb2.DESCRIPTOR)


class Descriptors:
    """File descriptors by name, by symbol and by extension; closed under dependencies."""

    def __init__(self, files: Iterable[FileDescriptorProto]) -> None:
        """Index ``files``, which must include all their dependencies."""
        self._files: dict[str, tuple[bytes, list[str]]] = {}
        self._symbols: dict[str, str] = {}
        self._extensions: dict[str, dict[int, str]] = {}
        for file in files:
            self._files[file.name] = (file.SerializeToString(deterministic=True), list(file.dependency))
            self._symbols.update(dict.fromkeys(_symbols(file), file.name))
            for name, _ in _messages(file):
                self._extensions.setdefault(name, {})
        for file in files:
            for extension in _extensions(file):
                self._extensions.setdefault(extension.extendee[1:], {})[extension.number] = file.name

    def named(self, name: str) -> list[bytes]:
        """A file and all its dependencies, serialized, the file itself first. Raises KeyError."""
        found, todo = {name: self._files[name][0]}, deque([name])
        while todo:
            for dependency in self._files[todo.popleft()][1]:
                if dependency not in found:
                    found[dependency] = self._files[dependency][0]
                    todo.append(dependency)
        return list(found.values())

    def defining(self, symbol: str) -> list[bytes]:
        """The file of a service, method, message, field, oneof, enum, enum value or extension. Raises KeyError."""
        return self.named(self._symbols[symbol])

    def extending(self, message: str, number: int) -> list[bytes]:
        """The file of a message's extension. Raises KeyError."""
        return self.named(self._extensions[message][number])

    def extensions(self, message: str) -> list[int]:
        """The numbers of a message's extensions. Raises KeyError for an unknown message."""
        return sorted(self._extensions[message])


class Reflection:
    """The two reflection services of a server."""

    def __init__(self, services: Sequence[str]) -> None:
        """``services`` are the names of the server's other services, whose generated code must be imported."""
        self._services = sorted([*services, V1, V1ALPHA])
        own = [Default().FindFileContainingSymbol(name) for name in (*services, V1ALPHA)]
        self._descriptors = Descriptors([*described([*own, *_DETAILS]), _v1()])

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register both services with ``server``."""
        # Without a deserializer the handler receives raw bytes, and can answer those that do not parse.
        handler = grpc.stream_stream_rpc_method_handler(
            self.stream, response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString
        )
        for service in (V1, V1ALPHA):
            server.add_registered_method_handlers(service, {_METHOD: handler})

    async def stream(
        self, requests: AsyncIterator[bytes], context: Any
    ) -> AsyncIterator[reflection_pb2.ServerReflectionResponse]:
        """Handle one call: answers each request, up to ``MAX_REQUESTS``."""
        asked = 0
        async for request in requests:
            asked += 1
            if asked > MAX_REQUESTS:
                text = f"a call may make at most {MAX_REQUESTS} requests; open another call for more"
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
            yield self.answer(request)

    def answer(self, data: bytes) -> reflection_pb2.ServerReflectionResponse:
        """The response to one serialized ServerReflectionRequest; errors are returned as ``error_response``."""
        if len(data) > MAX_REQUEST_BYTES:
            return _failed("INVALID_ARGUMENT", f"the request has {len(data)} bytes; the limit is {MAX_REQUEST_BYTES}")
        try:
            request = reflection_pb2.ServerReflectionRequest.FromString(data)
        except DecodeError as error:
            return _failed("INVALID_ARGUMENT", f"the message cannot be parsed: {error}")
        response = self._found(request)
        response.valid_host = request.host
        response.original_request.CopyFrom(request)
        return response

    def _found(self, request: reflection_pb2.ServerReflectionRequest) -> reflection_pb2.ServerReflectionResponse:
        response = reflection_pb2.ServerReflectionResponse()
        kind = request.WhichOneof("message_request")
        files = response.file_descriptor_response.file_descriptor_proto
        try:
            if kind == "file_by_filename":
                files.extend(self._descriptors.named(request.file_by_filename))
            elif kind == "file_containing_symbol":
                files.extend(self._descriptors.defining(request.file_containing_symbol))
            elif kind == "file_containing_extension":
                wanted = request.file_containing_extension
                files.extend(self._descriptors.extending(wanted.containing_type, wanted.extension_number))
            elif kind == "all_extension_numbers_of_type":
                message = request.all_extension_numbers_of_type
                numbers = self._descriptors.extensions(message)
                response.all_extension_numbers_response.base_type_name = message
                response.all_extension_numbers_response.extension_number.extend(numbers)
            elif kind == "list_services":
                for name in self._services:
                    response.list_services_response.service.add(name=name)
            else:
                return _failed("INVALID_ARGUMENT", "message_request is not set")
        except KeyError:
            return _failed("NOT_FOUND", f"{kind}: not found: {str(getattr(request, kind)).strip()!r}")
        return response


def _failed(code: str, message: str) -> reflection_pb2.ServerReflectionResponse:
    error = reflection_pb2.ErrorResponse(error_code=grpc.StatusCode[code].value[0], error_message=message)
    return reflection_pb2.ServerReflectionResponse(error_response=error)


def described(files: Iterable[FileDescriptor]) -> list[FileDescriptorProto]:
    """``files`` and their dependencies, each once, with the JSON name of every field, as protoc emits them."""
    found: dict[str, FileDescriptorProto] = {}
    todo = deque(files)
    while todo:
        file = todo.popleft()
        if file.name in found:
            continue
        proto = found[file.name] = FileDescriptorProto()
        file.CopyToProto(proto)
        fields = [field for _, message in _messages(proto) for field in message.field]
        for field in (*fields, *_extensions(proto)):
            field.json_name = field.json_name or json_name(field.name)
        todo.extend(file.dependencies)
    return list(found.values())


def json_name(name: str) -> str:
    """A field's default JSON name: ``request_id`` becomes ``requestId``."""
    head, *words = name.split("_")
    return head + "".join(word[:1].upper() + word[1:] for word in words)


def _v1() -> FileDescriptorProto:
    """The descriptor of v1: that of v1alpha, renamed and without its deprecation."""
    [alpha] = described([reflection_pb2.DESCRIPTOR])
    file = FileDescriptorProto()
    text_format.Parse(text_format.MessageToString(alpha).replace("v1alpha", "v1"), file)
    file.name = "grpc/reflection/v1/reflection.proto"
    file.options.ClearField("deprecated")
    return file


def _messages(file: FileDescriptorProto) -> Iterator[tuple[str, DescriptorProto]]:
    """Every message of a file, nested ones included, with its full name."""
    todo = [(_scope(file) + message.name, message) for message in file.message_type]
    while todo:
        name, message = todo.pop()
        yield name, message
        todo += [(f"{name}.{inner.name}", inner) for inner in message.nested_type]


def _scope(file: FileDescriptorProto) -> str:
    return f"{file.package}." if file.package else ""


def _extensions(file: FileDescriptorProto) -> Iterator[FieldDescriptorProto]:
    yield from file.extension
    for _, message in _messages(file):
        yield from message.extension


def _symbols(file: FileDescriptorProto) -> Iterator[str]:
    """The full name of everything that a file defines."""
    yield from _declared(file, _scope(file))
    for name, message in _messages(file):
        yield name
        yield from (f"{name}.{field.name}" for field in message.field)
        yield from (f"{name}.{oneof.name}" for oneof in message.oneof_decl)
        yield from _declared(message, f"{name}.")
    for service in file.service:
        yield _scope(file) + service.name
        yield from (f"{_scope(file)}{service.name}.{method.name}" for method in service.method)


def _declared(parent: FileDescriptorProto | DescriptorProto, scope: str) -> Iterator[str]:
    for enum in parent.enum_type:
        yield scope + enum.name
        yield from (scope + value.name for value in enum.value)  # in the enum's scope, as in C++
    yield from (scope + extension.name for extension in parent.extension)

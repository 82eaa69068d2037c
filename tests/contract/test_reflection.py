"""What reflection says of both services is what protoc says of their protos."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from rocmforge.engine.v1 import engine_pb2
from rocmforge.kvcache.v1 import kvcache_pb2
from services.common.edge.reflection import (
    MAX_REQUEST_BYTES,
    V1,
    V1ALPHA,
    Descriptors,
    Reflection,
    described,
    json_name,
)
from tests.processes import ROOT

ENGINE, CACHE = "rocmforge.engine.v1.EngineService", "rocmforge.kvcache.v1.KvCacheService"
HEALTH = "grpc.health.v1.Health"
FILES = [engine_pb2, kvcache_pb2, health_pb2, reflection_pb2, code_pb2, error_details_pb2, status_pb2]


@pytest.fixture(scope="module")
def reflection() -> Reflection:
    """Of a server with both services, which no process has."""
    return Reflection((ENGINE, CACHE, HEALTH))


def ask(reflection: Reflection, **request: Any) -> reflection_pb2.ServerReflectionResponse:
    asked = reflection_pb2.ServerReflectionRequest(host="me", **request)
    response = reflection.answer(asked.SerializeToString())
    assert (response.original_request, response.valid_host) == (asked, "me")
    return response


def files(response: reflection_pb2.ServerReflectionResponse) -> list[FileDescriptorProto]:
    assert not response.HasField("error_response"), response
    return [FileDescriptorProto.FromString(data) for data in response.file_descriptor_response.file_descriptor_proto]


def error(response: reflection_pb2.ServerReflectionResponse) -> tuple[int, str]:
    assert response.WhichOneof("message_response") == "error_response", response
    return response.error_response.error_code, response.error_response.error_message


def symbols(file: FileDescriptor) -> Iterator[str]:
    """Every name that a file defines, as the runtime knows it."""
    messages, enums = list(file.message_types_by_name.values()), list(file.enum_types_by_name.values())
    while messages:
        message = messages.pop()
        yield message.full_name
        yield from (f"{message.full_name}.{name}" for name in (*message.fields_by_name, *message.oneofs_by_name))
        messages += message.nested_types
        enums += message.enum_types
    for enum in enums:
        yield enum.full_name
        yield from (enum.full_name.removesuffix(enum.name) + value for value in enum.values_by_name)
    for service in file.services_by_name.values():
        yield service.full_name
        yield from (method.full_name for method in service.methods)


@pytest.mark.parametrize("module", FILES, ids=lambda module: module.DESCRIPTOR.name)
def test_every_symbol_leads_to_its_file(reflection: Reflection, module: Any) -> None:
    names = list(symbols(module.DESCRIPTOR))
    assert len(names) >= 4
    for name in names:
        [first, *others] = files(ask(reflection, file_containing_symbol=name))
        assert first.name == module.DESCRIPTOR.name, name
        assert set(first.dependency) <= {other.name for other in others}


def test_symbols_of_each_kind(reflection: Reflection) -> None:
    """Those of the test above are counted by the runtime; these by a reader."""
    package = "rocmforge.engine.v1"
    kinds = ["EngineService", "EngineService.Generate", "Prompt", "Prompt.text", "Prompt.input", "FinishReason"]
    for name in [*kinds, "FINISH_REASON_EOS", "Sampling.LogitBiasEntry", "Sampling.LogitBiasEntry.key"]:
        assert files(ask(reflection, file_containing_symbol=f"{package}.{name}"))[0].package == package
    nested = files(ask(reflection, file_containing_symbol="google.rpc.BadRequest.FieldViolation"))
    assert nested[0].name == "google/rpc/error_details.proto"


def test_the_files_are_protocs(reflection: Reflection, tmp_path: Path) -> None:
    """Field by field, the JSON names included; nothing of them is missing."""
    names = ["rocmforge/engine/v1/engine.proto", "rocmforge/kvcache/v1/kvcache.proto"]
    names += ["google/rpc/code.proto", "google/rpc/error_details.proto"]
    paths = [f"-I{ROOT / 'protos'}", f"-I{sysconfig.get_path('purelib')}", "--include_imports"]
    command = [sys.executable, "-m", "grpc_tools.protoc", *paths, f"--descriptor_set_out={tmp_path / 'set'}", *names]
    subprocess.run(command, check=True, timeout=60)
    expected = FileDescriptorSet.FromString((tmp_path / "set").read_bytes()).file
    assert {"google/rpc/status.proto", "google/protobuf/duration.proto"} < {file.name for file in expected}
    for file in expected:
        [first, *_] = files(ask(reflection, file_by_filename=file.name))
        assert first == file
    fields = {field.json_name for file in expected for message in file.message_type for field in message.field}
    assert "requestId" in fields and "request_id" not in fields


def test_a_pool_can_be_made_of_what_one_answer_has(reflection: Reflection) -> None:
    for name in (ENGINE, CACHE, HEALTH, V1, V1ALPHA):
        pool, found = DescriptorPool(), files(ask(reflection, file_containing_symbol=name))
        for file in reversed(found):
            pool.Add(file)
        assert pool.FindServiceByName(name).methods


def test_v1_is_v1alpha_under_another_name(reflection: Reflection) -> None:
    [v1] = files(ask(reflection, file_containing_symbol=f"{V1}.ServerReflectionInfo"))
    assert (v1.name, v1.package) == ("grpc/reflection/v1/reflection.proto", "grpc.reflection.v1")
    assert "alpha" not in str(v1) and not v1.options.deprecated
    [alpha] = files(ask(reflection, file_containing_symbol=V1ALPHA))
    assert [message.name for message in v1.message_type] == [message.name for message in alpha.message_type]
    assert [service.full_name for service in [pool_of(v1).FindServiceByName(V1)]] == [V1]


def pool_of(file: FileDescriptorProto) -> DescriptorPool:
    pool = DescriptorPool()
    pool.Add(file)
    return pool


def test_the_services_are_listed(reflection: Reflection) -> None:
    listed = ask(reflection, list_services="").list_services_response.service
    assert [service.name for service in listed] == sorted([ENGINE, CACHE, HEALTH, V1, V1ALPHA])


@pytest.mark.parametrize(
    "name",
    [
        *("", ".", "rocmforge.engine.v1", "rocmforge.engine.v1.", f".{ENGINE}", f"{ENGINE}.", f"{ENGINE}.Unheard"),
        *("Generate", "rocmforge.engine.v1.FinishReason.FINISH_REASON_EOS", "rocmforge.engine.v1.Prompt.text.x"),
    ],
)
def test_what_is_not_there_is_not_found(reflection: Reflection, name: str) -> None:
    for request in ({"file_containing_symbol": name}, {"file_by_filename": name}):
        code, message = error(ask(reflection, **request))
        assert code == 5 and repr(name) in message


def extended() -> tuple[FileDescriptorProto, FileDescriptorProto]:
    """A file with a message that may be extended, and one that extends it twice."""
    base = FileDescriptorProto(name="base.proto", package="p", syntax="proto2")
    base.message_type.add(name="Open").extension_range.add(start=100, end=200)
    other = FileDescriptorProto(name="other.proto", package="p.q", syntax="proto2", dependency=["base.proto"])
    kind = {"label": "LABEL_OPTIONAL", "type": "TYPE_INT32", "extendee": ".p.Open"}
    other.extension.add(name="at_top", number=102, **kind)
    other.message_type.add(name="Within").extension.add(name="inside_it", number=101, **kind)
    return base, other


def test_extensions() -> None:
    both = Descriptors(extended())
    assert both.extensions("p.Open") == [101, 102] and both.extensions("p.q.Within") == []
    for number, symbol in ((101, "p.q.Within.inside_it"), (102, "p.q.at_top")):
        found = [FileDescriptorProto.FromString(data).name for data in both.extending("p.Open", number)]
        assert found == ["other.proto", "base.proto"]
        assert both.defining(symbol) == both.extending("p.Open", number)
    for number in (0, 100, 103):
        with pytest.raises(KeyError):
            both.extending("p.Open", number)
    pool = DescriptorPool()
    for file in extended():
        pool.Add(file)
    [other, _] = described([pool.FindFileByName("other.proto")])
    assert other.extension[0].json_name == "atTop" and other.message_type[0].extension[0].json_name == "insideIt"


def test_extensions_of_the_services_messages(reflection: Reflection) -> None:
    answer = ask(reflection, all_extension_numbers_of_type="rocmforge.engine.v1.Prompt").all_extension_numbers_response
    assert (answer.base_type_name, list(answer.extension_number)) == ("rocmforge.engine.v1.Prompt", [])
    assert error(ask(reflection, all_extension_numbers_of_type="rocmforge.engine.v1.FinishReason"))[0] == 5
    wanted = reflection_pb2.ExtensionRequest(containing_type="rocmforge.engine.v1.Prompt", extension_number=7)
    code, message = error(ask(reflection, file_containing_extension=wanted))
    assert code == 5 and "rocmforge.engine.v1.Prompt" in message and "7" in message


def test_what_is_no_question_is_answered_so(reflection: Reflection) -> None:
    assert error(ask(reflection)) == (3, "message_request is not set")
    code, message = error(reflection.answer(b"\xff\xff\xff"))
    assert code == 3 and "cannot be parsed" in message
    for length, allowed in ((MAX_REQUEST_BYTES, True), (MAX_REQUEST_BYTES + 1, False)):
        name = "x" * (length - 3)
        data = reflection_pb2.ServerReflectionRequest(file_by_filename=name).SerializeToString()
        assert len(data) == length
        response = reflection.answer(data)
        assert error(response)[0] == (5 if allowed else 3)
        assert response.ByteSize() < 3 * MAX_REQUEST_BYTES


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("id", "id"),
        ("request_id", "requestId"),
        ("a_1_b", "a1B"),
        ("_x", "X"),
        ("x_", "x"),
        ("x__y", "xY"),
        ("aB", "aB"),
    ],
)
def test_json_names(name: str, expected: str) -> None:
    assert json_name(name) == expected
    file = FileDescriptorProto(name="one.proto")
    file.message_type.add(name="M").field.add(name=name, number=1, label="LABEL_OPTIONAL", type="TYPE_INT32")
    [made] = described([described_by_runtime(file)])
    assert made.message_type[0].field[0].json_name == expected
    assert described_by_runtime(file).message_types_by_name["M"].fields[0].json_name == expected


def described_by_runtime(file: FileDescriptorProto) -> FileDescriptor:
    return pool_of(file).FindFileByName(file.name)


def test_a_json_name_of_its_own_stays() -> None:
    file = FileDescriptorProto(name="own.proto")
    file.message_type.add(name="M").field.add(
        name="a_b", number=1, label="LABEL_OPTIONAL", type="TYPE_INT32", json_name="other"
    )
    [made] = described([described_by_runtime(file)])
    assert made.message_type[0].field[0].json_name == "other"

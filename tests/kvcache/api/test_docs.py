"""The grpcurl examples of docs/daemon.md are requests and responses of the protocol as it is."""

from __future__ import annotations

import re

import pytest
from google.protobuf import json_format, message_factory

from rocmforge.kvcache.v1 import kvcache_pb2 as pb
from tests.processes import ROOT

SERVICE = pb.DESCRIPTOR.services_by_name["KvCacheService"]
EXAMPLE = re.compile(r"^\$ grpcurl -plaintext (?:-d '([^']*)')?.*?KvCacheService/(\w+)\n(.*?)^```$", re.M | re.S)


def examples() -> list[tuple[str, str, str]]:
    """Method, body, and what it prints."""
    page = (ROOT / "docs" / "daemon.md").read_text().replace(", ...]", "]")
    found = [(method, body or "{}", printed) for body, method, printed in EXAMPLE.findall(page)]
    assert len(found) == page.count("$ grpcurl") >= 6
    return found


@pytest.mark.parametrize(("method", "body", "printed"), examples(), ids=[one[0] for one in examples()])
def test_an_example_is_of_the_protocol(method: str, body: str, printed: str) -> None:
    rpc = SERVICE.methods_by_name[method]
    json_format.Parse(body, message_factory.GetMessageClass(rpc.input_type)())
    for answer in re.findall(r"^\{\n.*?^\}$", printed, re.M | re.S):
        json_format.Parse(answer, message_factory.GetMessageClass(rpc.output_type)())

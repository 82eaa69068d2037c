# mypy: disable-error-code="arg-type"
"""A kernel's source as passed to a compiler, and the defines it accepts."""

from __future__ import annotations

import re

import pytest

from kernels.device import source

TEXT = """// A kernel.
// defines: RF_TYPE=F16|BF16 RF_SIZE=2..
// defines: RF_FAST=0|1
// variants: RF_TYPE=F16|BF16 RF_SIZE=2|16
// variants: RF_TYPE=BF16 RF_SIZE=16 RF_FAST=1
// variants: RF_TYPE=F16 RF_SIZE=2
#include "common.h"
RF_KERNEL nothing() {}
"""


def test_the_header_is_part_of_the_text_and_lines_keep_their_numbers() -> None:
    text = source.inlined(TEXT, "x.hip")
    assert "#include <hip/hip_runtime.h>" in text and '#include "common.h"' not in text
    assert "#pragma once" not in text
    name, line, found = "", 0, {}
    for row in text.splitlines():
        if match := re.fullmatch(r'#line (\d+) "(.*)"', row):
            line, name = int(match[1]), match[2]
        else:
            found[name, line] = row
            line += 1
    own = TEXT.splitlines()
    assert found["x.hip", 1] == own[0]
    assert found["x.hip", 8] == own[7]
    header = (source.FOLDER / "common.h").read_text().splitlines()
    last = len(header)
    assert found["common.h", last] == header[-1]
    assert found["common.h", last // 2] == header[last // 2 - 1]


@pytest.mark.parametrize("text", ["", '#include "other.h"\n', '#include "common.h"\n#include <math.h>\n'])
def test_a_kernel_includes_the_header_and_nothing_else(text: str) -> None:
    with pytest.raises(ValueError, match=r'x\.hip: a kernel includes "common\.h", and nothing else'):
        source.inlined(text, "x.hip")


def test_defines_are_checked() -> None:
    assert source.checked(TEXT, {"RF_SIZE": 3, "RF_TYPE": "F16"}, "x.hip") == {"RF_SIZE": "3", "RF_TYPE": "F16"}
    assert source.checked(TEXT, {"RF_FAST": 1}, "x.hip") == {"RF_FAST": "1"}
    for defines, message in [
        ({"RF_TYP": "F16"}, "x.hip: RF_TYP=F16: no such define; it has RF_TYPE, RF_SIZE, RF_FAST"),
        ({"RF_TYPE": "F32"}, "x.hip: RF_TYPE=F32: must be one of F16, BF16"),
        ({"RF_SIZE": 1}, "x.hip: RF_SIZE=1: must be one of 2.."),
        ({"RF_SIZE": "-3"}, "x.hip: RF_SIZE=-3: must be one of 2.."),
        ({"RF_SIZE": "3; x"}, "x.hip: RF_SIZE=3; x: must be one of 2.."),
    ]:
        with pytest.raises(ValueError, match=re.escape(message)):
            source.checked(TEXT, defines, "x.hip")
    with pytest.raises(ValueError, match="it has none"):
        source.checked('#include "common.h"\n', {"A": 1}, "x.hip")


def test_variants_are_every_combination_once() -> None:
    assert source.variants(TEXT, "x.hip") == [
        {"RF_SIZE": "2", "RF_TYPE": "F16"},
        {"RF_SIZE": "16", "RF_TYPE": "F16"},
        {"RF_SIZE": "2", "RF_TYPE": "BF16"},
        {"RF_SIZE": "16", "RF_TYPE": "BF16"},
        {"RF_FAST": "1", "RF_SIZE": "16", "RF_TYPE": "BF16"},
    ]
    assert source.variants("// variants:\n", "x.hip") == [{}]
    assert source.variants("", "x.hip") == []


@pytest.mark.parametrize("line", ["defines: RF_TYPE", "defines: =3", "variants: RF_TYPE="])
def test_declarations_that_are_none(line: str) -> None:
    with pytest.raises(ValueError, match=r"x\.hip: // (defines|variants): .* is not NAME=VALUE\|VALUE"):
        source.variants(f"// {line}\n", "x.hip")


def test_a_variant_is_of_the_defines() -> None:
    with pytest.raises(ValueError, match="RF_TYPE=F64: must be one of F32"):
        source.variants("// defines: RF_TYPE=F32\n// variants: RF_TYPE=F32|F64\n", "x.hip")


@pytest.mark.parametrize("name", source.names())
def test_every_kernel_declares_what_it_reads(name: str) -> None:
    text = source.read(name)
    declared = {
        word.partition("=")[0] for line in re.findall(r"^// defines:(.*)$", text, re.M) for word in line.split()
    }
    # The last begins the kernel's own text again, behind the header.
    own = text.rpartition("#line ")[2]
    assert [define for define in declared if not re.search(rf"\b{define}\b", own.replace("// defines:", ""))] == []
    source.variants(text, name)


def test_a_kernel_that_is_not_there() -> None:
    with pytest.raises(ValueError, match=r"kernel 'gemm': must be one of activation, .*rope"):
        source.read("gemm")

# mypy: disable-error-code="arg-type, var-annotated"
"""The forward pass: a row's logits, K and V are the same bits in any batch."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from services.common.errors import ForwardFailed, ModelInvalid
from services.engine.model.batch import Row
from services.engine.model.decoder import Model
from services.engine.pages.source import PageLayout
from tests.models.checkpoints import llama_config, random_tensors, write_checkpoint
from tests.models.families import FAMILIES, family_tensors

ROOT = Path(__file__).parents[3]
LENGTH = 280  # beyond two tiles of keys


@pytest.fixture(scope="module", params=["4 query heads on 2", "3 on 3", "qwen2", "qwen3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    if request.param in FAMILIES:  # with a bias, and with a norm of each head
        config = FAMILIES[request.param]
        tensors = family_tensors(config, 0)
    else:
        four = request.param.startswith("4")
        config = llama_config(query_heads=4 if four else 3, kv_heads=2 if four else 3)
        tensors = random_tensors(config)
    return Model.load(write_checkpoint(tmp_path_factory.mktemp("model"), config, tensors))


def arena(model: Model, total_pages: int, page_size: int, fill: float = np.nan) -> NDArray[np.float32]:
    g = model.geometry(page_size)
    return np.full((total_pages, g.layers, 2, g.kv_heads, page_size, g.head_dim), fill, np.float32)


@cache
def prompt(number: int) -> list[int]:
    """A random sequence; 0 and 1 have their first 150 tokens in common."""
    tokens = np.random.default_rng(number).integers(0, 128, LENGTH).tolist()
    return prompt(0)[:150] + tokens[150:] if number == 1 else tokens


@cache
def expected(model: Model, number: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Logits ``[position, vocab]``, K and V ``[layer, 2, head, position, dim]`` of a prompt token by token, alone."""
    pages = arena(model, 1, LENGTH)
    logits = [model.forward([Row([token], at, [0], True)], pages)[0] for at, token in enumerate(prompt(number))]
    return np.stack(logits), pages[0]


@dataclass
class Running:
    """A prompt on its way through the model, in chunks."""

    number: int
    pages: list[int]
    length: int
    start: int = 0
    seen: list[int] = field(default_factory=list)


def positions_of(pages: NDArray[np.float32], table: list[int], length: int) -> NDArray[np.float32]:
    """K and V ``[layer, 2, head, position, dim]`` of the first ``length`` positions of a block table."""
    return np.concatenate(list(pages[table]), axis=3)[:, :, :, :length]


@pytest.mark.filterwarnings("error")
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_no_bit_depends_on_batch_chunks_pages_or_prefix_hits(model: Model, data: st.DataObject) -> None:
    page_size = data.draw(st.sampled_from([1, 3, 7, 16, 24, 64, 128, 300]), "page size")
    total_pages = 5 * -(-LENGTH // page_size)
    pages = arena(model, total_pages, page_size, data.draw(st.sampled_from([np.nan, np.inf, 0.0, 1e30]), "left over"))
    free = np.random.default_rng(data.draw(st.integers(0, 9))).permutation(total_pages).tolist()
    running, done = [], []
    for number in data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=5, unique=True), "prompts"):
        length = data.draw(st.integers(1, LENGTH) | st.just(LENGTH), "length")
        count = -(-length // page_size)
        running.append(Running(number, [free.pop() for _ in range(count)], length))
    while running:
        batch = data.draw(st.lists(st.sampled_from(running), min_size=1, unique_by=id), "batch")
        rows = []
        for r in batch:
            if r.start == 0 and r.number == 1 and (hit := [d for d in done if d.number == 0]):
                # A prefix hit: whole pages of prompt 0 that hold the common tokens; one token at least is run.
                shared = min(150, hit[0].length, r.length - 1) // page_size
                r.pages[:shared], r.start = hit[0].pages[:shared], shared * page_size
            left = r.length - r.start
            count = data.draw(st.integers(1, left) | st.just(1) | st.just(left), "chunk")
            wants = data.draw(st.sampled_from([0, 1, count]) | st.integers(0, count), "logits")
            rows.append(Row(prompt(r.number)[r.start : r.start + count], r.start, r.pages, wants))
        logits = iter(model.forward(rows, pages))
        for r, row in zip(batch, rows, strict=True):
            r.start += len(row.tokens)
            for at in range(r.start - row.want_logits, r.start):
                assert np.array_equal(next(logits), expected(model, r.number)[0][at])
        assert next(logits, None) is None
        done += [r for r in batch if r.start == r.length]
        running = [r for r in running if r.start < r.length]
    for r in done:
        assert np.array_equal(positions_of(pages, r.pages, r.length), expected(model, r.number)[1][..., : r.length, :])


def test_logits_can_be_made_a_few_at_a_time(model: Model) -> None:
    states = model.states([Row(prompt(2)[:50], 0, range(8), 50)], arena(model, 8, 16))
    logits = np.concatenate([model.logits(states[at : at + 7]) for at in range(0, 50, 7)])
    assert np.array_equal(logits, expected(model, 2)[0][:50])
    assert 1 <= model.logits_at_once == (1 << 26) // model.config.vocab_size


def test_a_copied_page_is_the_other_and_both_are_there(model: Model) -> None:
    pages = arena(model, 4, 16)
    model.forward([Row(prompt(2)[:10], 0, [1], False)], pages)
    model.copy_page(pages, 1, 3)
    row = Row(prompt(2)[10:11], 10, [3], True)
    assert np.array_equal(model.forward([row], pages)[0], expected(model, 2)[0][10])
    assert np.array_equal(positions_of(pages, [1], 10), expected(model, 2)[1][..., :10, :])
    for source, target in ((-1, 0), (0, 4)):
        with pytest.raises(ForwardFailed, match="the arena has 4"):
            model.copy_page(pages, source, target)
    with pytest.raises(ForwardFailed, match="shape"):
        model.copy_page(pages[:, :1].copy(), 0, 1)


def test_the_pages_are_all_there_is(model: Model) -> None:
    # The same pages under another model object, and other pages under the same: nothing is remembered in between.
    pages = arena(model, 8, 16)
    model.forward([Row(prompt(2)[:100], 0, range(8), False)], pages)
    copy = pages.copy()
    other = arena(model, 8, 16)
    model.forward([Row(prompt(3)[:100], 0, range(8), False)], other)
    row = Row(prompt(2)[100:101], 100, range(8), True)
    assert np.array_equal(model.forward([row], pages), model.forward([row], copy))
    assert np.array_equal(model.forward([row], copy)[0], expected(model, 2)[0][100])
    assert not np.array_equal(model.forward([row], other), model.forward([row], copy))


def test_a_chunk_run_twice_changes_nothing(model: Model) -> None:
    pages = arena(model, 8, 16)
    rows = [Row(prompt(2)[:40], 0, [0, 1, 2], True), Row(prompt(3)[:9], 0, [5], True)]
    first = model.forward(rows, pages)
    before = pages.copy()
    assert np.array_equal(model.forward(rows[:1], pages), first[:1])
    assert np.array_equal(pages, before, equal_nan=True)


def test_rows_write_to_their_own_slots_alone(model: Model) -> None:
    pages = arena(model, 6, 16, fill=7.0)
    model.forward([Row(prompt(2)[:20], 0, [4, 2], True)], pages)
    untouched = np.delete(pages, [2, 4], axis=0)
    assert (untouched == 7.0).all()
    assert (pages[2][..., 4:, :] == 7.0).all()


def test_logits_come_in_the_order_of_the_rows_that_want_them(model: Model) -> None:
    pages = arena(model, 6, 64)
    rows = [Row(prompt(n)[:10], 0, [n], n in (0, 2, 3)) for n in range(5)]
    logits = model.forward(rows, pages)
    assert logits.dtype == np.float32
    assert logits.shape == (3, 128)
    for got, number in zip(logits, (0, 2, 3), strict=True):
        assert np.array_equal(got, expected(model, number)[0][9])
    assert model.forward([Row([1], 0, [5], False)], pages).shape == (0, 128)
    assert model.forward([], pages).shape == (0, 128)


def test_tokens_and_pages_may_be_any_sequence_of_integers(model: Model) -> None:
    tokens = prompt(2)[:5]
    outputs = [
        model.forward([Row(kind(tokens), 0, kind([1, 0]), True)], arena(model, 2, 4))
        for kind in (list, tuple, lambda values: np.array(values, np.uint32))
    ]
    assert np.array_equal(outputs[0], outputs[1])
    assert np.array_equal(outputs[0], outputs[2])


GOOD: dict[str, Any] = {"tokens": [1, 2, 3], "start": 14, "pages": [0, 1], "want_logits": True}


@pytest.mark.parametrize(
    "wrong,said",
    [
        ({"tokens": []}, "no tokens"),
        ({"start": -1}, "position"),
        ({"start": 510, "pages": list(range(4)) * 20}, "position outside 0 to 511"),
        ({"pages": [0]}, "too few pages"),
        ({"pages": []}, "too few pages"),
        ({"pages": [0, 4]}, "page outside 0 to 3"),
        ({"pages": [0, -1]}, "page outside 0 to 3"),
        ({"tokens": [1, 128, 3]}, "token outside 0 to 127"),
        ({"tokens": [-1]}, "token outside 0 to 127"),
        ({"want_logits": 4}, "wants the logits of more tokens than it has"),
        ({"want_logits": -1}, "wants the logits of more tokens than it has"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_row_that_cannot_be_is_named_and_nothing_is_written(model: Model, wrong: dict[str, Any], said: str) -> None:
    pages = arena(model, 4, 16, fill=7.0)
    model.forward([Row(**GOOD)], pages.copy())
    with pytest.raises(ForwardFailed, match=f"row 1 .*{said}"):
        model.forward([Row(**GOOD), Row(**(GOOD | wrong))], pages)
    assert (pages == 7.0).all()


@pytest.mark.parametrize(
    "change",
    [
        lambda pages: pages.astype(np.float64),
        lambda pages: pages.reshape(pages.shape[0], -1),
        lambda pages: pages[:, :1].copy(),
        lambda pages: pages[..., :8].copy(),
        lambda pages: pages[:, :, :, ::-1],
    ],
    ids=["float64", "flat", "layers", "head_dim", "strided"],
)
def test_pages_of_another_shape_are_refused(model: Model, change: Any) -> None:
    with pytest.raises(ForwardFailed, match="pages"):
        model.forward([Row([1], 0, [0], True)], change(arena(model, 4, 16, fill=0.0)))


def test_geometry_is_the_models(model: Model) -> None:
    assert model.geometry(24) == PageLayout(24, 2, model.config.kv_heads, model.config.head_dim, "f32")


def test_a_model_outlives_its_files(tmp_path: Path) -> None:
    config = llama_config()
    loaded = Model.load(write_checkpoint(tmp_path, config, random_tensors(config)))
    before = loaded.forward([Row([1, 2], 0, [0], True)], arena(loaded, 1, 16))
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.write(bytes(64) * 1000)
    assert np.array_equal(loaded.forward([Row([1, 2], 0, [0], True)], arena(loaded, 1, 16)), before)


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelInvalid, match="nowhere: there is no such folder or file"):
        Model.load(tmp_path / "nowhere")


# --- the kernels of BLAS ---------------------------------------------------------------------------------------------


def blas_kernels() -> list[str]:
    """The kernels that OpenBLAS can use on this machine; another BLAS ignores the setting."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        flags = ""
    needs = {"SkylakeX": "avx512vl", "Haswell": "avx2", "Sandybridge": "avx", "Nehalem": "sse4_2", "Prescott": "pni"}
    return ["", *(name for name, flag in needs.items() if f" {flag} " in flags)]


EXACT = """
import numpy as np
from services.engine.model.batch import Row
from services.engine.model.decoder import Model

model = Model.load("models/shakespeare")
tokens = np.random.default_rng(0).integers(0, 1024, 150).tolist()
g = model.geometry(16)

def run(*batches):
    pages = np.zeros((60, g.layers, 2, g.kv_heads, 16, g.head_dim), np.float32)
    for batch in batches:
        logits = model.forward(batch, pages)
    return logits[0]

table, others = range(10), [Row(tokens[i : 40 + i], 0, range(10 + 5 * i, 15 + 5 * i), True) for i in range(9)]
whole = run([Row(tokens, 0, table, True)])
parts = run([Row(tokens[:61], 0, table, False)], [Row(tokens[61:149], 61, table, False)],
            [Row(tokens[149:], 149, table, True), *others])
single = run([Row(tokens[:115], 0, table, True)],
             *([Row([tokens[at]], at, table, True)] for at in range(115, 150)))
raise SystemExit(not (np.array_equal(whole, parts) and np.array_equal(whole, single)))
"""


@pytest.mark.parametrize("kernel,threads", [*((kernel, "1") for kernel in blas_kernels()), ("", "2")])
def test_the_bits_hold_under_every_kernel_of_blas(kernel: str, threads: str) -> None:
    chosen = {"OPENBLAS_CORETYPE": kernel} if kernel else {}
    environment = os.environ | chosen | {"OPENBLAS_NUM_THREADS": threads, "PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", EXACT], cwd=ROOT, env=environment, timeout=100).returncode == 0

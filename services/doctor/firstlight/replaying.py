"""Steps that are replayed against the same steps launched one by one: every bit is the same, whatever the inputs."""

from __future__ import annotations

import sys
from typing import Any

from services.doctor.firstlight import step

HIDDEN, INNER, ROUNDS = 256, 512, 6


def body(report: step.Report, asked: step.Asked) -> None:
    """Compare."""
    import cupy
    import numpy as np

    from kernels.ops_cupy import CupyOps
    from kernels.replay.graphs import Graphs
    from kernels.replay.tapes import Tapes

    ops = CupyOps(asked.gpu, "f32", "f32", 16)
    rng = np.random.default_rng(0)
    up, down = (
        ops.weight(rng.standard_normal(shape, np.float32) / 16, "f32")
        for shape in ((2 * INNER, HIDDEN), (HIDDEN, INNER))
    )
    norm = ops.weight(np.ones(HIDDEN, np.float32), "f32")
    refused: list[str] = []
    kinds: dict[str, Any] = {"tapes": Tapes()}
    try:
        kinds["graphs"] = Graphs(refused=refused.append)
    except ValueError as error:
        report.skipped(str(error))
    for name, replays in kinds.items():
        report.begin(name)
        # Rows for our own products, and for the library's.
        for rows in (1, 24):
            x = ops.weight(rng.standard_normal((rows, HIDDEN), np.float32), "f32")

            def compute(x: Any = x) -> Any:
                normed, _ = ops.rms_norm(x, norm, 1e-5)
                return ops.linear(ops.silu_mul(ops.linear(normed, up)), down)

            differ = 0
            for _ in range(ROUNDS):
                x.set(rng.standard_normal((rows, HIDDEN), np.float32))
                wanted = cupy.asnumpy(compute())
                found = cupy.asnumpy(replays.run(("first light", rows), compute))
                differ += int(np.count_nonzero(wanted.view(np.uint32) != found.view(np.uint32)))
            if not report.check(
                not differ,
                f"{name}: {ROUNDS} steps of {rows} rows give the bits of steps that are launched one by one",
                f"{name}: {differ} numbers of {ROUNDS} steps of {rows} rows differ from steps launched one by one",
            ):
                return
        nothing = f"{name}: nothing was replayed"
        if name == "graphs" and refused:
            nothing = f"{nothing}: {refused[0]}"
        report.check(replays.replayed > 0, f"{name}: {replays.replayed} steps were replayed", nothing)


if __name__ == "__main__":
    sys.exit(step.run(body))

"""Decode and prefill as an engine launches them, with the tuning file, against what this GPU's memory can read."""

from __future__ import annotations

import sys

from services.doctor.firstlight import bandwidth, step
from services.doctor.firstlight.tuner import Bench, cases


def body(report: step.Report, asked: step.Asked) -> None:
    """Measure."""
    import cupy

    from kernels.attention import selftest
    from kernels.device import module, tuning
    from kernels.device.gpu import target, this_gpu
    from rocmforge.client.arena.gpu_ipc import Runtime

    gpu = Runtime.load().gpu(asked.gpu)
    gpu.use()
    path = step.tuning_path(target(asked.gpu))
    tuned = tuning.NOTHING
    if path.exists():
        tuned = tuning.read(path, target(asked.gpu))
        report.passed(f"the tuning file is one that an engine takes: {len(tuned.attention)} shapes of attention")
    else:
        report.skipped("there is no tuning file: the kernels' own choices are measured")
    report.begin("read")
    size = bandwidth.size_of(asked)
    source, out = gpu.allocate(size), gpu.allocate(1 << 12)
    cupy.cuda.runtime.memset(source, 0, size)
    ceiling = bandwidth.Reads(asked, source, out).rate("read")
    gpu.free(source)
    gpu.free(out)
    for case in cases(asked):
        report.begin(case.key)
        bench = Bench(case, asked)
        chosen = tuned.gpu(this_gpu(), "BF16", case.kv_dtype, case.head_dim, case.group)
        verdict = selftest.tested(selftest.CupyDevice(module.load), bench.geometry, chosen)
        took = bench.seconds(verdict.gpu, asked.of(15, 5, 1))
        if not asked.timed:
            report.passed(f"{case.key} runs as tuned")
            continue
        if case.new == 1:
            rate = bench.kv_bytes / took
            report.number(case.key, f"{case.key}: 64 rows of 4096 keys", round(rate / 1e12, 3), "TB/s")
            report.passed(f"{case.key} reads at {rate / ceiling:.0%} of what memory can be read at")
        else:
            rate = bench.operations / took / 1e12
            how = "matrix units" if verdict.state == "used" else "scalar"
            key = "prefill-matrix" if verdict.state == "used" else "prefill-scalar"
            report.number(key, f"prefill of 2048 behind 6144, as tuned: {how}", round(rate, 1), "TFLOP/s")
        del bench
        cupy.get_default_memory_pool().free_all_blocks()


if __name__ == "__main__":
    sys.exit(step.run(body))

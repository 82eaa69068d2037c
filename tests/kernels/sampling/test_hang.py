"""The sampler terminates on AMD GPUs; without the barrier after a single-thread block at a loop's end it would not."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from kernels.device import source
from kernels.sampling.launch import Batch, Sampler, settings
from tests import tools
from tests.kernels.device import amdgcn
from tests.simulators import amdgpu

#: One row, whose cut falls among equals, so that the search goes on after a round of fine bins.
ROW = np.round(np.random.default_rng(0).standard_normal((1, 600))).astype(np.float32)


def without_barrier(text: str) -> str:
    """Return the sampler's text as it was: without the barrier that ends the loop of `narrow`."""
    narrow = text.index("RF_INLINE Cut narrow(")
    end = text.index("return {", narrow)
    at = text.rindex("__syncthreads();", narrow, end)
    return text[:at] + text[text.index("\n", at) :]


class Old(amdgpu.Amd):
    """A device that has the sampler as it was."""

    def compile(self, name: str, defines: Mapping[str, str | int] | None = None) -> amdgpu.Module:
        return self.compile_text(without_barrier(source.read(name)), defines, f"{name}.hip")


def draw(device: amdgpu.Amd) -> None:
    batch = Batch.of([settings(seed=1, temperature=100.0, top_k=300)], [1])
    Sampler(device, "F32", ROW.shape[1], 128).sample(device.array(ROW), batch, ROW.shape[1])


@pytest.mark.parametrize("gpu", ["gfx942", "gfx90a", "gfx1100"])
def test_the_sampler_hung(gpu: str) -> None:
    tools.need("g++", *amdgcn.TOOLS)
    bound = 100_000
    draw(amdgpu.Amd(gpu, bound=bound))
    with pytest.raises(
        amdgpu.Fault, match=r"sample_tokens on gfx.*does not end: 100000 instructions.*in a loop of \d+"
    ):
        draw(Old(gpu, bound=bound, whole_barriers=False))
    # Which is seen before: one lane of a wave is not at the barrier where the others are.
    with pytest.raises(
        amdgpu.Fault, match=r"a barrier that not all lanes of the wave reach: EXEC is 0x[0-9a-f]*[02468ace]$"
    ):
        draw(Old(gpu, bound=bound))

"""Compare the pages of a pool as torch tensors with the same pages as NumPy arrays: `torch_views.py ADDRESS DTYPE`."""

from __future__ import annotations

import sys

import torch

from rocmforge.client import KvCache, PageLayout
from rocmforge.client.arena.host import HostPages

NAMES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "int8": torch.int8}


def check(condition: bool, what: str) -> None:
    if not condition:
        raise SystemExit(f"torch differs from NumPy: {what}")


def main(address: str, dtype: str) -> None:
    layout = PageLayout(page_size=4, layers=3, kv_heads=2, head_dim=8, dtype=dtype)
    with KvCache.connect(address, f"torch {dtype}", layout, pool_pages=5) as cache:
        pages = cache.pages
        check(isinstance(pages, HostPages), "the pages are not in host memory")
        plain, tensors = pages.numpy(), pages.torch()
        check(tuple(tensors.kv.shape) == plain.kv.shape, f"shape {tuple(tensors.kv.shape)}, not {plain.kv.shape}")
        check(tensors.kv.dtype == NAMES[dtype], f"dtype {tensors.kv.dtype}")
        tensors.kv[2, 1, 0, 1, 3] = 1
        check(tensors.layer(1)[2, 0, 1, 3].tolist() == [1] * layout.head_dim, "a layer is another memory")
        check(bool(plain.raw[2].any()), "what torch writes, NumPy does not see")
        plain.raw[2] = 0
        check(not tensors.kv[2].any(), "what NumPy writes, torch does not see")
        if dtype == "int8":
            tensors.scales[0, 0, 0, 1] = 2.0
            check(plain.scales[0, 0, 0, 1] == 2.0, "the scales are another memory")
        del tensors


if __name__ == "__main__":
    main(*sys.argv[1:])

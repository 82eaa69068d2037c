"""The methods that `rocmforge.vllm.direct` replaces, as this vLLM has them: run by vLLM's Python."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.block_pool import BlockPool

from rocmforge.vllm.direct.coordinator import check_seams, install
from rocmforge.vllm.model import Unsupported


def main() -> None:
    """Raise RuntimeError unless they fit, and others are refused."""
    check_seams()
    whole = BlockPool.get_new_blocks

    def other(self: Any, num_blocks: int, hint: int) -> Any:
        return whole(self, num_blocks)

    BlockPool.get_new_blocks = other
    try:
        check_seams()
    except Unsupported as error:
        print(error)
    else:
        raise RuntimeError("a method with other parameters was not refused")
    finally:
        BlockPool.get_new_blocks = whole

    nothing: Any = None

    class Manager:
        """A KV cache manager of another kind."""

        coordinator: Any = type("HybridKVCacheCoordinator", (), {"single_type_managers": (object(), object())})()

    try:
        install(Manager, nothing, nothing)
    except Unsupported as error:
        print(error)
    else:
        raise RuntimeError("another kind of manager was not refused")


if __name__ == "__main__":
    main()

"""Tests that are coroutines run on a loop of the daemon's kind."""

from __future__ import annotations

import asyncio
import inspect

import pytest
import uvloop


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run it, and fail it for tasks that it left behind."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    arguments = {name: pyfuncitem.funcargs[name] for name in names if name in pyfuncitem.funcargs}

    async def test() -> None:
        await pyfuncitem.obj(**arguments)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, left

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(test())
    return True

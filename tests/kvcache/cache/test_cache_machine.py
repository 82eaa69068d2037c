"""Random histories of the state object against the model."""

from __future__ import annotations

from tests.kvcache.cache.stateful.machine import CacheMachine, Direct, examples, new_world


class DirectMachine(CacheMachine):
    make_driver = staticmethod(lambda: Direct(new_world()))


DirectMachine.TestCase.settings = examples(120)
TestCacheMachine = DirectMachine.TestCase

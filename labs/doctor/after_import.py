"""Do something as soon as a module has been imported: a script may set the environment, or fail, before it does so."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable


class AfterImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """First in sys.meta_path, it calls `then` as soon as module `name` has been imported."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self.name, self.then = name, then

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        """The true finders' answer, with this as its loader."""
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            self.loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: object) -> object:
        """As the true loader does."""
        return self.loader.create_module(spec)

    def exec_module(self, module: object) -> None:
        """The import itself."""
        module.__loader__ = module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        self.then()


def after_import(name: str, then: Callable[[], None]) -> None:
    """Call `then` now if the module is there, or when it is."""
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, AfterImport(name, then))

"""`import headwater` makes converted models known to transformers' Auto classes, whichever is imported first.

headwater must not import transformers by itself (seconds, and it may not be installed), so if transformers is not
there yet, a finder waits for the module of the Auto models, and steps aside once it has been loaded.
"""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

AUTO_MODELS = "transformers.models.auto.modeling_auto"


class _ThenRegister(Loader):
    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        register()


class _AwaitAutoModels(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != AUTO_MODELS:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenRegister(spec.loader)
        return spec


def register() -> None:
    from headwater.hf.convert.registration import register_types

    register_types()


def register_or_wait() -> None:
    if AUTO_MODELS in sys.modules:
        register()
    elif not any(isinstance(finder, _AwaitAutoModels) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AwaitAutoModels())

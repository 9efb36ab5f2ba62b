"""What users of torch get by ``import muster.worker``, without a further line.

It is imported with the package where torch is loaded, and else at the end of torch's own import. Barrier type
``grpc`` is registered when torch's registry is imported: that alone brings all of
``torch.distributed.checkpoint``, hundreds of modules that not every program needs.
"""

import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from torch.distributed import DistStoreError

from muster.worker.errors import MusterError

REGISTRY = "torch.distributed.checkpoint._experimental.barriers"
"""Torch's module of barrier types; some versions of torch have none."""
OURS = "muster.worker.barriers"
"""It registers barrier type ``grpc`` at its import."""

# The SDK may have been imported first. Its errors are caught as if torch had been.
if not issubclass(MusterError, DistStoreError):
    MusterError.__bases__ = (DistStoreError,)


class _RegistersLater(MetaPathFinder):
    """Imports our barriers right after torch's registry."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != REGISTRY:
            return None
        others = (one for one in sys.meta_path if one is not self)
        spec = next((found for one in others if (found := one.find_spec(fullname, path, target))), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            with suppress(ImportError):  # A program that uses the SDK gets the error there. Torch goes on.
                import_module(OURS)

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


if REGISTRY in sys.modules:
    import_module(OURS)
else:
    sys.meta_path.insert(0, _RegistersLater())

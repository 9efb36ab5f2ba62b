"""What torch loads by itself: it makes ``muster://`` and the rendezvous backend ``muster`` known.

It does nothing more, unless the SDK is loaded already: then its users get what they would have if torch had
been loaded before.

torch loads the entry points of its group ``torch.backends`` at the end of its own import, unless
``TORCH_DEVICE_BACKEND_AUTOLOAD=0``, and fails if one of them does. It loads those of ``torchrun.handlers``
with its elastic rendezvous, which may be amid an import of the SDK. So this imports nothing but torch's own
registry, which is there by then; and it stands beside the package, whose name a script ``muster.py`` may
take away. Else the SDK is imported when one of the two is used.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import Store
    from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousParameters

SCHEME = "muster"


def register() -> None:
    """Make the scheme known to torch; doing so twice, or where torch has no ``distributed``, does no harm."""
    try:
        from torch.distributed.rendezvous import register_rendezvous_handler
    except ImportError:
        return
    with suppress(RuntimeError):  # It is known already.
        register_rendezvous_handler(SCHEME, _meet)  # type: ignore[no-untyped-call]
    if "muster.worker" in sys.modules:
        with suppress(ImportError):  # Who uses the SDK hears of it there, and torch goes on.
            import_module("muster.worker.torch_compat")


def handler_creator() -> "Callable[[RendezvousParameters], RendezvousHandler]":
    """What makes handlers of the rendezvous backend ``muster``, as torch asks for it."""
    return _create_handler


def _meet(url: str, **options: Any) -> "Iterator[tuple[Store, int, int]]":  # noqa: ANN401
    _check_package(url)
    from muster.worker.init_method import meet

    return meet(url, **options)


def _create_handler(parameters: "RendezvousParameters") -> "RendezvousHandler":
    _check_package("the rendezvous backend muster")
    from muster.worker.rendezvous import create_handler

    return create_handler(parameters)


def _check_package(used: str) -> None:
    package = find_spec("muster")
    if package is not None and package.origin is not None:  # Ours is a namespace package, which has none.
        raise ImportError(
            f"{used} cannot be used: {package.origin} has the name of the installed package muster and is "
            "found before it. Rename it, or start the program where Python does not find it."
        )

"""Whether a framework is the one with which its adapter was tried."""

import inspect
from collections.abc import Mapping, Sequence


def check_signatures(adapter: str, owner: type, signatures: Mapping[str, Sequence[str]], tried: str) -> None:
    """Refuse a framework if its functions have other parameters than the adapter knows.

    Args:
        adapter: the module's name in ``muster.worker.integrations``.
        owner: the framework's class in which the adapter stands.
        signatures: by the function's name, the names of its parameters in order, ``self`` among them.
        tried: the framework's name and version with which the adapter was tried.

    Raises:
        ImportError: a function is missing or differs.
    """
    for name, parameters in signatures.items():
        if list(inspect.signature(getattr(owner, name, lambda: None)).parameters) != list(parameters):
            raise ImportError(
                f"muster.worker.integrations.{adapter} was tried with {tried}; here {owner.__name__}.{name} "
                "differs."
            )

"""Docstrings name objects as Sphinx does (``:class:`Decision```); the site makes links of them."""

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):`~?([\w.]+)`")


class Roles(griffe.Extension):
    """Puts Markdown in the place of Sphinx's roles."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:  # noqa: ANN401 - griffe's own signature
        """See :class:`griffe.Extension`."""
        if obj.docstring:
            obj.docstring.value = _ROLE.sub(lambda role: _link(obj, role[1]), obj.docstring.value)


def _link(obj: griffe.Object, name: str) -> str:
    short = f"`{name.rpartition('.')[2]}`" if name.startswith("muster.") else f"`{name}`"
    if not name.startswith("muster."):
        try:
            name = obj.resolve(name)
        except griffe.NameResolutionError:
            return short
    return f"[{short}][{name}]" if name.startswith("muster.") else short

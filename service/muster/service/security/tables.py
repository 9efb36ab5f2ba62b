"""The tables of the tokens file, field by field. No message shows a field's value, which may be a token."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muster.service.security.files import FileError
from muster.service.security.grants import Role


@dataclass(slots=True)
class Table:
    """One table, and its name in messages."""

    said: Mapping[str, Any]
    where: str

    def check_fields(self, *known: str) -> None:
        """Check that the table has only known fields.

        Raises:
            FileError: it has others.
        """
        unknown = self.said.keys() - set(known)
        if unknown:
            # Do not show an unknown name: it may be a token in the wrong place.
            raise FileError(f"{self.where} has {len(unknown)} unknown fields: {', '.join(known)} are known.")

    def name(self) -> str:
        """Return the name of the table, and show it in messages from now on.

        Raises:
            FileError: the table has no name.
        """
        name = self.said.get("name")
        if not _is_text(name):
            raise FileError(f"{self.where} needs a name: printable text, which is shown in refusals.")
        self.where += f' ("{name}")'
        return str(name)

    def role(self) -> Role:
        """Return the role.

        Raises:
            FileError: the table has no valid role.
        """
        role = self.said.get("role")
        if not isinstance(role, str) or role.upper() not in Role.__members__:
            roles = ", ".join(one.name.lower() for one in Role)
            raise FileError(f"{self.where} needs a role: one of {roles}.")
        return Role[role.upper()]

    def runs(self) -> tuple[str, ...]:
        """Return the patterns of runs.

        Raises:
            FileError: the field is not a list of patterns.
        """
        runs = self.said.get("runs", ["*"])
        if not isinstance(runs, list) or not runs or not all(isinstance(one, str) and one for one in runs):
            raise FileError(f'{self.where}: runs must be a list of patterns, such as ["team-a-*"].')
        return tuple(runs)

    def nodes(self, role: Role, *, required: bool = True) -> tuple[str, ...]:
        """Return the patterns of a watcher's nodes.

        Args:
            role: the role of the table.
            required: whether a watcher's table must have them.

        Raises:
            FileError: the field is missing, not a list of patterns, or in the table of another role.
        """
        nodes = self.said.get("nodes")
        if role is not Role.WATCHER:
            if nodes is not None:
                raise FileError(
                    f"{self.where}: nodes is for the role watcher, and its role is {role.name.lower()}. "
                    "Remove nodes."
                )
            return ()
        if nodes is None:
            if required:
                raise FileError(
                    f'{self.where} needs nodes: the names of the nodes that it may drain, or ["*"] for all.'
                )
            return ()
        if not isinstance(nodes, list) or not nodes or not all(map(_is_text, nodes)):
            raise FileError(f'{self.where}: nodes must be a list of patterns, such as ["gpu-*"].')
        return tuple(nodes)

    def text(self, field: str, what: str) -> str:
        """Return a required text.

        Raises:
            FileError: the field is missing or not printable text.
        """
        if (value := self.optional_text(field)) is None:
            raise FileError(f"{self.where} needs {field}: {what}.")
        return value

    def optional_text(self, field: str) -> str | None:
        """Return an optional text.

        Raises:
            FileError: the field is not printable text.
        """
        value = self.said.get(field)
        if value is not None and not _is_text(value):
            raise FileError(f"{self.where}: {field} must be printable text.")
        return value

    def path(self, field: str) -> Path | None:
        """Return an optional path.

        Raises:
            FileError: the field is not printable text.
        """
        value = self.optional_text(field)
        return Path(value) if value is not None else None

    def number(self, field: str, default: float, *, maximum: float) -> float:
        """Return a number from 0 to a maximum.

        Raises:
            FileError: the field is not such a number.
        """
        value = self.said.get(field, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= maximum:
            raise FileError(f"{self.where}: {field} must be a number from 0 to {maximum:g}.")
        return float(value)

    def texts(self, field: str, example: str) -> dict[str, str]:
        """Return a nested table with at least one text.

        Raises:
            FileError: the field is not such a table.
        """
        value = self.said.get(field)
        if not isinstance(value, dict) or not value or not all(map(_is_text, value.values())):
            raise FileError(f"{self.where} needs {field}: a table of texts, such as {example}.")
        return value


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value) and value.isprintable()

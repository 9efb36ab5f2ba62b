"""The tables of the tokens file, field by field. No message shows what a field holds: it may be a token."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muster.service.security.files import FileError
from muster.service.security.grants import Role


@dataclass(slots=True)
class Table:
    """One table, and what messages call it."""

    said: Mapping[str, Any]
    where: str

    def check_fields(self, *known: str) -> None:
        """See that there are no others.

        Raises:
            FileError: there are.
        """
        unknown = self.said.keys() - set(known)
        if unknown:
            # A name that is not known may be a token that was put in the wrong place.
            raise FileError(f"{self.where} has {len(unknown)} unknown fields: {', '.join(known)} are known.")

    def name(self) -> str:
        """Its name, by which messages call it from now on.

        Raises:
            FileError: it has none.
        """
        name = self.said.get("name")
        if not _is_text(name):
            raise FileError(f"{self.where} needs a name: printable text, which is shown in refusals.")
        self.where += f' ("{name}")'
        return str(name)

    def role(self) -> Role:
        """Its role.

        Raises:
            FileError: it has none.
        """
        role = self.said.get("role")
        if not isinstance(role, str) or role.upper() not in Role.__members__:
            roles = ", ".join(one.name.lower() for one in Role)
            raise FileError(f"{self.where} needs a role: one of {roles}.")
        return Role[role.upper()]

    def runs(self) -> tuple[str, ...]:
        """Its patterns of runs.

        Raises:
            FileError: they are none.
        """
        runs = self.said.get("runs", ["*"])
        if not isinstance(runs, list) or not runs or not all(isinstance(one, str) and one for one in runs):
            raise FileError(f'{self.where}: runs must be a list of patterns, such as ["team-a-*"].')
        return tuple(runs)

    def text(self, field: str, what: str) -> str:
        """A field that must be there.

        Raises:
            FileError: it is not, or not printable text.
        """
        if (value := self.optional_text(field)) is None:
            raise FileError(f"{self.where} needs {field}: {what}.")
        return value

    def optional_text(self, field: str) -> str | None:
        """A field that may be there.

        Raises:
            FileError: it is there, and not printable text.
        """
        value = self.said.get(field)
        if value is not None and not _is_text(value):
            raise FileError(f"{self.where}: {field} must be printable text.")
        return value

    def path(self, field: str) -> Path | None:
        """A file that may be named.

        Raises:
            FileError: its name is no text.
        """
        value = self.optional_text(field)
        return Path(value) if value is not None else None

    def number(self, field: str, default: float, *, most: float) -> float:
        """A number from 0 on.

        Raises:
            FileError: it is another, or none.
        """
        value = self.said.get(field, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
            raise FileError(f"{self.where}: {field} must be a number from 0 to {most:g}.")
        return float(value)

    def texts(self, field: str, example: str) -> dict[str, str]:
        """A table of texts in this one, with one at least.

        Raises:
            FileError: it is something else.
        """
        value = self.said.get(field)
        if not isinstance(value, dict) or not value or not all(map(_is_text, value.values())):
            raise FileError(f"{self.where} needs {field}: a table of texts, such as {example}.")
        return value


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value) and value.isprintable()

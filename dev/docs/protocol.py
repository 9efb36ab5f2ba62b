"""The reference of the protocol, from the comments in proto/."""

import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)

PACKAGE = "muster.v1"
"""What a coordinator speaks; the subset of etcd's API beside it is etcd's to document."""
PROTOS = Path(__file__).resolve().parents[2] / "proto"
# The numbers of fields in descriptor.proto, by which source information names its places.
_FILE_SYNTAX, _FILE_MESSAGE, _FILE_ENUM, _FILE_SERVICE = 12, 4, 5, 6
_MESSAGE_FIELD, _MESSAGE_ONEOF, _ENUM_VALUE, _SERVICE_METHOD = 2, 8, 2, 2


def descriptors(protos: Path = PROTOS) -> FileDescriptorSet:
    """The protos with their comments, read by the ``buf`` beside this Python.

    Raises:
        subprocess.CalledProcessError: they cannot be read.
    """
    buf = Path(sys.executable).with_name("buf")
    command = [str(buf), "build", str(protos), "--as-file-descriptor-set", "--output", "-"]
    return FileDescriptorSet.FromString(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def pages(files: FileDescriptorSet) -> dict[str, str]:
    """The Markdown of each of Muster's own proto files, by its name without folder and suffix.

    Raises:
        ValueError: something has no comment.
    """
    ours = [file for file in files.file if file.package == PACKAGE]
    places = {
        f".{file.package}.{name}": f"{_stem(file)}.md#{name.lower()}"
        for file in ours
        for name in (*(one.name for one in file.message_type), *(one.name for one in file.enum_type))
    }
    return {_stem(file): "\n".join(_Page(file, places).lines()) + "\n" for file in ours}


def _stem(file: FileDescriptorProto) -> str:
    return Path(file.name).stem


@dataclass
class _Page:
    file: FileDescriptorProto
    places: Mapping[str, str]
    """Where each message and enum is, by its full name."""
    comments: dict[tuple[int, ...], str] = field(init=False)

    def __post_init__(self) -> None:
        self.comments = {
            tuple(one.path): (one.leading_comments or one.leading_detached_comments[0]).strip()
            for one in self.file.source_code_info.location
            if one.leading_comments or one.leading_detached_comments
        }

    def lines(self) -> Iterator[str]:
        file = self.file
        yield from (f"# {_stem(file)}.proto", "", self._comment(file.name, _FILE_SYNTAX))
        for index, service in enumerate(file.service):
            yield from self._service(service, (_FILE_SERVICE, index))
        for index, message in enumerate(file.message_type):
            yield from self._message(message, (_FILE_MESSAGE, index))
        for index, enum in enumerate(file.enum_type):
            yield from self._enum(enum, (_FILE_ENUM, index))

    def _service(self, service: ServiceDescriptorProto, path: tuple[int, ...]) -> Iterator[str]:
        yield from self._heading(service.name, "service", path)
        rows = []
        for index, method in enumerate(service.method):
            takes, gives = self._type(method.input_type), self._type(method.output_type)
            rows.append(
                (
                    f"`{method.name}`",
                    f"stream of {takes}" if method.client_streaming else takes,
                    f"stream of {gives}" if method.server_streaming else gives,
                    self._comment(f"{service.name}.{method.name}", *path, _SERVICE_METHOD, index),
                )
            )
        yield from _table(("Call", "Takes", "Answers", "Meaning"), rows)

    def _message(self, message: DescriptorProto, path: tuple[int, ...]) -> Iterator[str]:
        yield from self._heading(message.name, "message", path)
        real = [index for index, one in enumerate(message.oneof_decl) if not _is_made(message, index)]
        for index in real:
            name = message.oneof_decl[index].name
            comment = self._comment(f"{message.name}.{name}", *path, _MESSAGE_ONEOF, index)
            yield from ("", f"One of `{name}` is set. {comment}")
        if not message.field:
            yield from ("", "It has no fields.")
            return
        rows = [
            (
                str(one.number),
                f"`{one.name}`",
                self._field_type(message, one, real),
                self._comment(f"{message.name}.{one.name}", *path, _MESSAGE_FIELD, index),
            )
            for index, one in enumerate(message.field)
        ]
        yield from _table(("No.", "Field", "Type", "Meaning"), rows)

    def _enum(self, enum: EnumDescriptorProto, path: tuple[int, ...]) -> Iterator[str]:
        yield from self._heading(enum.name, "enum", path)
        rows = [
            (
                str(one.number),
                f"`{one.name}`",
                self._comment(f"{enum.name}.{one.name}", *path, _ENUM_VALUE, index),
            )
            for index, one in enumerate(enum.value)
        ]
        yield from _table(("No.", "Value", "Meaning"), rows)

    def _heading(self, name: str, kind: str, path: tuple[int, ...]) -> Iterator[str]:
        comment = self._comment(name, *path)
        yield from ("", f"## {name}", "", f"*{kind}*{{ .kind }} {comment.replace(chr(10), ' ')}")

    def _comment(self, what: str, *path: int) -> str:
        comment = self.comments.get(path)
        if not comment:
            raise ValueError(f"{what} in proto/{self.file.name} has no comment above it")
        return comment

    def _type(self, name: str) -> str:
        short = name.rpartition(".")[2] if name in self.places else name.lstrip(".")
        return f"[`{short}`]({self.places[name]})" if name in self.places else f"`{short}`"

    def _field_type(self, message: DescriptorProto, one: FieldDescriptorProto, oneofs: list[int]) -> str:
        if one.type_name:
            shown = self._type(one.type_name)
        else:
            shown = f"`{FieldDescriptorProto.Type.Name(one.type).removeprefix('TYPE_').lower()}`"
        if one.label == FieldDescriptorProto.LABEL_REPEATED:
            return f"repeated {shown}"
        if one.proto3_optional:
            return f"optional {shown}"
        if one.HasField("oneof_index") and one.oneof_index in oneofs:
            return f"{shown}, in `{message.oneof_decl[one.oneof_index].name}`"
        return shown


def _is_made(message: DescriptorProto, index: int) -> bool:
    """Whether the compiler has made a oneof, for an optional field."""
    return any(one.proto3_optional and one.oneof_index == index for one in message.field)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield from ("", _row(head), _row("-" for _ in head))
    yield from map(_row, rows)


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace(chr(10), ' ').replace('|', chr(92) + '|') for cell in cells)} |"

"""Writes docs/api.md from the protos' comments: `make docs`."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc_tools
from google.protobuf import descriptor_pb2
from grpc_tools import protoc

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/api.md"
FILES = ("generation", "record", "common", "worker", "draft", "target")
"""What callers need first, then what the services say to one another."""
HEAD = """# API reference

Generated from the comments in `protos/outrider/v1/` by `make docs`: edit those. Clients need `GenerationService` alone;
`outrider.Client` speaks it for you. The other services are between coordinators and workers.

An absent `optional` field means its default, and any other field that is absent is zero, empty or false. A failure is
a gRPC status with `google.rpc` details: `BadRequest` names the field, `ErrorInfo` the reason, `RetryInfo` when to come
back.
"""

SERVICE, MESSAGE, ENUM = 6, 4, 5  # field numbers of FileDescriptorProto: what paths in the source info begin with
METHOD, FIELD, VALUE = 2, 2, 2
Path_ = tuple[int, ...]
_SCALARS = descriptor_pb2.FieldDescriptorProto.Type


class File:
    """A proto file, and the comment above each of its elements."""

    def __init__(self, proto: descriptor_pb2.FileDescriptorProto) -> None:
        self.proto = proto
        located = {tuple(one.path): one.leading_comments for one in proto.source_code_info.location}
        self._comments = {path: re.sub(r"\s+", " ", text).strip() for path, text in located.items()}

    @property
    def name(self) -> str:
        return self.proto.name

    def comment(self, *path: int) -> str:
        return self._comments.get(path, "")

    @property
    def about(self) -> str:
        """The comment at the top of the file."""
        source = (ROOT / "protos" / self.name).read_text(encoding="utf-8")
        lines = []
        for line in source.splitlines():
            if not line.startswith("//"):
                break
            lines.append(line.removeprefix("//").strip())
        return "\n".join(lines).strip()

    def sections(self) -> Iterator[str]:
        """Services, messages and enums, each with a heading."""
        for index, service in enumerate(self.proto.service):
            yield self._service(index, service)
        for index, message in enumerate(self.proto.message_type):
            yield self._message(index, message)
        for index, enum in enumerate(self.proto.enum_type):
            yield self._enum(index, enum)

    def _service(self, index: int, service: descriptor_pb2.ServiceDescriptorProto) -> str:
        rows = []
        for number, method in enumerate(service.method):
            asked = _stream(method.client_streaming) + _link(method.input_type)
            given = _stream(method.server_streaming) + _link(method.output_type)
            rows.append((f"`{method.name}`", asked, given, self.comment(SERVICE, index, METHOD, number)))
        table = _table(("call", "request", "response", "what it does"), rows)
        return f"### {service.name}\n\n{self.comment(SERVICE, index)}\n\n{table}"

    def _message(self, index: int, message: descriptor_pb2.DescriptorProto) -> str:
        maps = {one.name: one for one in message.nested_type if one.options.map_entry}
        rows = []
        for number, field in enumerate(message.field):
            meaning = self.comment(MESSAGE, index, FIELD, number)
            if field.HasField("oneof_index") and not field.proto3_optional:
                meaning = f"*(one of `{message.oneof_decl[field.oneof_index].name}`)* {meaning}"
            rows.append((f"`{field.name}`", _type(field, maps), meaning))
        table = _table(("field", "type", "meaning"), rows) if rows else "No fields.\n"
        return f"### {message.name}\n\n{self.comment(MESSAGE, index)}\n\n{table}"

    def _enum(self, index: int, enum: descriptor_pb2.EnumDescriptorProto) -> str:
        values = enumerate(enum.value)
        rows = [(f"`{v.name}`", str(v.number), self.comment(ENUM, index, VALUE, number)) for number, v in values]
        return f"### {enum.name}\n\n{self.comment(ENUM, index)}\n\n{_table(('value', 'number', 'meaning'), rows)}"


def _stream(is_streaming: bool) -> str:
    return "stream of " if is_streaming else ""


def _link(type_name: str) -> str:
    name = type_name.rpartition(".")[2]
    return f"[{name}](#{name.lower()})"


def _type(field: descriptor_pb2.FieldDescriptorProto, maps: dict[str, descriptor_pb2.DescriptorProto]) -> str:
    name = field.type_name.rpartition(".")[2]
    if name in maps:
        key, value = maps[name].field
        return f"map of {_type(key, {})} to {_type(value, {})}"
    what = _link(field.type_name) if name else _SCALARS.Name(field.type).removeprefix("TYPE_").lower()
    if field.label == field.LABEL_REPEATED:
        return f"repeated {what}"
    return f"optional {what}" if field.proto3_optional else what


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def read_files() -> list[File]:
    """In the order of the page, those that it does not know last."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "protos.binpb"
        sources = sorted(str(path.relative_to(ROOT / "protos")) for path in (ROOT / "protos").rglob("*.proto"))
        include = Path(grpc_tools.__file__).parent / "_proto"
        flags = [f"-I{ROOT / 'protos'}", f"-I{include}", f"--descriptor_set_out={out}", "--include_source_info"]
        if protoc.main(["protoc", *flags, *sources]):
            raise SystemExit("protoc has failed")
        found = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file
    order = {name: rank for rank, name in enumerate(FILES)}
    return sorted(map(File, found), key=lambda file: (order.get(Path(file.name).stem, len(order)), file.name))


def page() -> str:
    """The whole of docs/api.md."""
    parts = [HEAD]
    for file in read_files():
        parts.append(f"## {file.name}\n\n{file.about}\n")
        parts += file.sections()
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

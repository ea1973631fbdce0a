"""Print the reference of every RPC in Markdown, made from the comments of protos/.

    "$(scripts/codegen-venv.sh)/python" scripts/rpc_reference.py > rpc.md

The site and the bundle of protos show the page, which is not committed. It runs in the venv of the
generator.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from google.protobuf import descriptor_pool, message_factory, text_format
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
    MethodOptions,
)

PROTOS = Path(__file__).resolve().parents[1] / "protos"
HEAD = """# Reference of every RPC

This page is generated from the comments of [protos/](../protos/README.md).
[clients.md](clients.md) says which call comes when, and what a client does on which error. Every
call needs a deadline. A `request_id` is new for each logical call, and the same in its repeats.
"""
OWN = "treadle."
METHOD_OPTIONS = MethodOptions.DESCRIPTOR
Location = tuple[int, ...]  # place of an element within its file, as SourceCodeInfo counts
# Field numbers of descriptor.proto.
PACKAGE, MESSAGES, ENUMS, SERVICES, MEMBERS, NESTED_MESSAGES, NESTED_ENUMS = 2, 4, 5, 6, 2, 3, 4


class Reference:
    """Reference page of all RPCs, by package."""

    def __init__(self, files: FileDescriptorSet) -> None:
        self._files = [file for file in files.file if file.package.startswith(OWN)]
        pool = self._pool = descriptor_pool.DescriptorPool()
        if METHOD_OPTIONS.file.name not in {
            file.name for file in files.file
        }:  # no option of Treadle's own needs it
            pool.AddSerializedFile(METHOD_OPTIONS.file.serialized_pb)
        for file in files.file:
            pool.Add(file)

    def lines(self) -> Iterator[str]:
        """Yield the lines of the page."""
        yield HEAD
        yield "| service | RPCs |\n|---|---|"
        for file in self._files:
            for service in file.service:
                name = f"{file.package}.{service.name}"
                rpcs = ", ".join(
                    f"[{method.name}](#{name}.{method.name})" for method in service.method
                )
                yield f"| [{name}](#{name}) | {rpcs} |"
        for file in self._files:
            yield f"\n## {file.name}\n"
            yield from self._file(file, _Comments(file))

    def _file(self, file: FileDescriptorProto, comments: "_Comments") -> Iterator[str]:
        yield f"`package {file.package}` {comments.of((PACKAGE,))}".rstrip()
        for i, service in enumerate(file.service):
            yield from _heading(f"{file.package}.{service.name}", comments.of((SERVICES, i)))
            for j, method in enumerate(service.method):
                name, words = (
                    f"{file.package}.{service.name}.{method.name}",
                    comments.of((SERVICES, i, MEMBERS, j)),
                )
                yield f'\n<a id="{name}"></a>**{method.name}** {self._signature(method)}' + (
                    f"\\\n{words}" if words else ""
                )
        for i, message in enumerate(file.message_type):
            yield from self._message(
                f"{file.package}.{message.name}", message, (MESSAGES, i), comments
            )
        for i, enum in enumerate(file.enum_type):
            yield from _enum(f"{file.package}.{enum.name}", enum, (ENUMS, i), comments)

    def _signature(self, method: MethodDescriptorProto) -> str:
        """Return the types of a method, and the options that are Treadle's own."""
        streams = (
            "stream " if method.client_streaming else "",
            "stream " if method.server_streaming else "",
        )
        shown = (
            f"({streams[0]}{_link(method.input_type)}) → {streams[1]}{_link(method.output_type)}"
        )
        kind = message_factory.GetMessageClass(
            self._pool.FindMessageTypeByName(METHOD_OPTIONS.full_name)
        )
        for option, value in kind.FromString(method.options.SerializeToString()).ListFields():
            if option.is_extension:
                shown += (
                    f", {option.name}: `{text_format.MessageToString(value, as_one_line=True)}`"
                )
        return shown

    def _message(
        self, name: str, message: DescriptorProto, path: Location, comments: "_Comments"
    ) -> Iterator[str]:
        yield from _heading(name, comments.of(path))
        if message.field:
            yield "\n| # | field | type | |\n|---|---|---|---|"
        for i, field in enumerate(message.field):
            kind = _type(field, message)
            yield (
                f"| {field.number} | `{field.name}` | {kind} | "
                f"{comments.of((*path, MEMBERS, i), table=True)} |"
            )
        for i, nested in enumerate(message.nested_type):
            if not nested.options.map_entry:
                yield from self._message(
                    f"{name}.{nested.name}", nested, (*path, NESTED_MESSAGES, i), comments
                )
        for i, enum in enumerate(message.enum_type):
            yield from _enum(f"{name}.{enum.name}", enum, (*path, NESTED_ENUMS, i), comments)


class _Comments:
    def __init__(self, file: FileDescriptorProto) -> None:
        self._by_path = {
            tuple(each.path): f"{each.leading_comments} {each.trailing_comments}"
            for each in file.source_code_info.location
        }

    def of(self, path: Location, *, table: bool = False) -> str:
        """Return the comments before and after an element, on one line."""
        words = " ".join(self._by_path.get(path, "").split()).replace("<", "&lt;")
        return words.replace("|", "\\|") if table else words


def _heading(name: str, comment: str) -> Iterator[str]:
    yield f'\n<a id="{name}"></a>\n### {name.removeprefix(OWN)}'
    if comment:
        yield f"\n{comment}"


def _enum(
    name: str, enum: EnumDescriptorProto, path: Location, comments: _Comments
) -> Iterator[str]:
    yield from _heading(name, comments.of(path))
    yield "\n| # | value | |\n|---|---|---|"
    for i, value in enumerate(enum.value):
        yield (
            f"| {value.number} | `{value.name}` | {comments.of((*path, MEMBERS, i), table=True)} |"
        )


def _link(type_name: str) -> str:
    name = type_name.removeprefix(".")
    return f"[{name.rpartition('.')[2]}](#{name})" if name.startswith(OWN) else name


def _type(field: FieldDescriptorProto, message: DescriptorProto) -> str:
    for nested in message.nested_type:
        if nested.options.map_entry and field.type_name.endswith(f".{message.name}.{nested.name}"):
            key, value = nested.field
            return f"map&lt;{_type(key, nested)}, {_type(value, nested)}>"
    name = (
        _link(field.type_name)
        if field.type_name
        else FieldDescriptorProto.Type.Name(field.type)[5:].lower()
    )
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {name}"
    if field.proto3_optional:
        return f"optional {name}"
    if field.HasField("oneof_index"):
        return f"{name} (one of `{message.oneof_decl[field.oneof_index].name}`)"
    return name


def describe_protos(protos: Path) -> FileDescriptorSet:
    """Return the descriptors of all protos below a folder, with their imports and comments."""
    names = sorted(str(path.relative_to(protos)) for path in protos.rglob("*.proto"))
    protoc = [sys.executable, "-m", "grpc_tools.protoc", f"-I{protos}", *names]
    options = ["--include_imports", "--include_source_info", "--descriptor_set_out=/dev/stdout"]
    made = subprocess.run([*protoc, *options], stdout=subprocess.PIPE, check=True)
    return FileDescriptorSet.FromString(made.stdout)


if __name__ == "__main__":
    sys.stdout.write("\n".join(Reference(describe_protos(PROTOS)).lines()) + "\n")

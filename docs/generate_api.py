"""Writes docs/api.md from the protos and their comments: `python docs/generate_api.py`.

Must not know: what any message means; words and order come from the descriptors that protoc makes of the sources.
"""

import tempfile
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)
from grpc_tools import protoc

TARGET = Path(__file__).with_name("api.md")
PROTOS = Path(__file__).parents[1] / "protos"
HEADER = """# API reference

Made from the `.proto` files of `protos/tokenwire` by `docs/generate_api.py`; a test fails when it is stale. Both
services answer server reflection, so `grpcurl` and the like need no files. *optional* fields tell unset from zero; in
a *one of* at most one is set.
"""
# The services that people call come first.
ORDER = ("tokenizer", "engine", "common")

# Numbers of the fields of descriptor.proto, of which the path of a comment consists.
_MESSAGES, _ENUMS, _SERVICES = 4, 5, 6
_FIELDS, _NESTED, _NESTED_ENUMS, _VALUES, _METHODS = 2, 3, 4, 2, 2
Place = tuple[int, ...]


def render() -> str:
    """The whole page."""
    described = sorted(_descriptors().file, key=lambda file: (ORDER.index(file.package.split(".")[1]), file.name))
    parts = [HEADER, *(part for file in described for part in _file(file, _comments(file)))]
    return "\n".join(parts).rstrip() + "\n"


def _descriptors() -> FileDescriptorSet:
    sources = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto"))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "all.binpb"
        paths = [f"--proto_path={PROTOS}", f"--proto_path={files('grpc_tools') / '_proto'}"]
        if protoc.main(["protoc", *paths, "--include_source_info", f"--descriptor_set_out={out}", *sources]) != 0:
            raise SystemExit("protoc failed")
        return FileDescriptorSet.FromString(out.read_bytes())


def _comments(file: FileDescriptorProto) -> dict[Place, str]:
    """The comment before each element, by its path."""
    return {tuple(each.path): each.leading_comments for each in file.source_code_info.location}


def _file(file: FileDescriptorProto, comments: dict[Place, str]) -> Iterator[str]:
    yield f"## {file.package}: {Path(file.name).name}\n"
    for place, service in enumerate(file.service):
        yield from _service(service, (_SERVICES, place), comments)
    for place, message in enumerate(file.message_type):
        yield from _message(message, (_MESSAGES, place), comments, "")
    for place, enum in enumerate(file.enum_type):
        yield from _enum(enum, (_ENUMS, place), comments, "")


def _service(service: ServiceDescriptorProto, path: Place, comments: dict[Place, str]) -> Iterator[str]:
    yield from _heading(f"service {service.name}", comments.get(path, ""))
    yield from ("| call | takes | answers | |", "|---|---|---|---|")
    for place, method in enumerate(service.method):
        takes = ("stream of " if method.client_streaming else "") + f"`{_short(method.input_type)}`"
        answers = ("stream of " if method.server_streaming else "") + f"`{_short(method.output_type)}`"
        words = _line(comments.get((*path, _METHODS, place), ""))
        yield f"| `{method.name}` | {takes} | {answers} | {words} |"
    yield ""


def _message(message: DescriptorProto, path: Place, comments: dict[Place, str], scope: str) -> Iterator[str]:
    name = scope + message.name
    yield from _heading(name, comments.get(path, ""))
    if not message.field:
        yield "No fields.\n"
    else:
        yield from ("| field | number | type | |", "|---|---|---|---|")
        for place, field in enumerate(message.field):
            words = _line(comments.get((*path, _FIELDS, place), ""))
            yield f"| `{field.name}` | {field.number} | {_type(field, message)} | {words} |"
        yield ""
    for place, nested in enumerate(message.nested_type):
        if not nested.options.map_entry:
            yield from _message(nested, (*path, _NESTED, place), comments, f"{name}.")
    for place, enum in enumerate(message.enum_type):
        yield from _enum(enum, (*path, _NESTED_ENUMS, place), comments, f"{name}.")


def _enum(enum: EnumDescriptorProto, path: Place, comments: dict[Place, str], scope: str) -> Iterator[str]:
    yield from _heading(f"enum {scope}{enum.name}", comments.get(path, ""))
    yield from ("| value | number | |", "|---|---|---|")
    for place, value in enumerate(enum.value):
        words = _line(comments.get((*path, _VALUES, place), ""))
        yield f"| `{value.name}` | {value.number} | {words} |"
    yield ""


def _heading(title: str, comment: str) -> Iterator[str]:
    yield f"### {title}\n"
    if comment:
        yield _prose(comment.splitlines()) + "\n"


def _prose(lines: Sequence[str]) -> str:
    """A comment as Markdown: indented lines are code, as they are in the sources."""
    text = [line.removeprefix(" ").rstrip() for line in lines]
    return "\n".join("    " + line.strip() if line.startswith("  ") else line for line in text)


def _line(comment: str) -> str:
    """A comment as one cell of a table."""
    return " ".join(comment.split()).replace("|", "\\|")


def _type(field: FieldDescriptorProto, message: DescriptorProto) -> str:
    scalar = FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    name = _short(field.type_name) if field.type_name else scalar
    entry = next((each for each in message.nested_type if each.name == name.rpartition(".")[2]), None)
    if entry is not None and entry.options.map_entry:
        key, value = (_type(each, entry).strip("`") for each in entry.field)
        return f"map of `{key}` to `{value}`"
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated `{name}`"
    if field.proto3_optional:
        return f"optional `{name}`"
    if field.HasField("oneof_index"):
        return f"`{name}`, one of *{message.oneof_decl[field.oneof_index].name}*"
    return f"`{name}`"


def _short(name: str) -> str:
    """Without our package: `.tokenwire.engine.v1.Finish` is `Finish`, as its heading says."""
    parts = name.removeprefix(".").split(".")
    return ".".join(parts[3:]) if parts[0] == "tokenwire" else ".".join(parts)


if __name__ == "__main__":
    TARGET.write_text(render())

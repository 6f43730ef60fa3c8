"""The wire contract: stubs are fresh, the descriptors keep the rules."""

import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.descriptor import FieldDescriptor, FileDescriptor

from tokenwire.common.v1 import outcome_pb2, sampling_pb2
from tokenwire.engine.v1 import engine_pb2
from tokenwire.tokenizer.v1 import tokenizer_pb2

PROTOS = Path(__file__).parents[2] / "protos"
FILES = [module.DESCRIPTOR for module in (outcome_pb2, sampling_pb2, engine_pb2, tokenizer_pb2)]


def test_stubs_are_what_the_sources_generate(tmp_path: Path) -> None:
    subprocess.run([sys.executable, PROTOS / "generate.py", tmp_path], check=True)
    fresh = {file.relative_to(tmp_path): file.read_text() for file in tmp_path.rglob("*.py*")}
    assert fresh
    for name, text in fresh.items():
        assert (PROTOS / name).read_text() == text, f"{name} is stale: run `make protos`"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_enum_starts_unspecified(file: FileDescriptor) -> None:
    for enum in file.enum_types_by_name.values():
        assert enum.values_by_number[0].name.endswith("_UNSPECIFIED")


def test_every_tunable_tells_unset_from_zero() -> None:
    tunables = (sampling_pb2.SamplingParams, tokenizer_pb2.GenerationOptions)
    for message in tunables:
        for field in message.DESCRIPTOR.fields:
            is_scalar = field.type != FieldDescriptor.TYPE_MESSAGE and not field.is_repeated
            assert field.has_presence or not is_scalar, f"{field.full_name} has no presence"

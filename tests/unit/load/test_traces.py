"""Readers of recorded traffic: what each format means, bounds, and errors with the line."""

import json
import time
from pathlib import Path

import pytest

from tokenwire_client.load.traces import TraceError, TraceFormat, read_trace
from tokenwire_client.load.workload import TraceEntry

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:17:05.9799600,110,0
"""
MOONCAKE = """{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48]}

{"timestamp": 30535, "input_length": 600, "output_length": 26, "hash_ids": [46, 2354]}
"""


def turns(question: str, answer: str) -> dict[str, object]:
    return {"id": "x", "conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]}


def written(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text, encoding="utf-8")
    return path


def test_azure(tmp_path: Path) -> None:
    found = read_trace(written(tmp_path, AZURE), TraceFormat.AZURE)
    assert [(round(e.at, 3), e.input_tokens, e.output_tokens) for e in found] == [
        (0.0, 4808, 10),
        (0.052, 3180, 8),
        (2.0, 110, 1),
    ]


def test_azure_of_2024_has_a_zone(tmp_path: Path) -> None:
    text = AZURE.replace("9799600", "979960+00:00").replace("0319600", "031960+00:00")
    assert [round(e.at, 3) for e in read_trace(written(tmp_path, text), TraceFormat.AZURE)] == [0.0, 0.052, 2.0]


def test_mooncake(tmp_path: Path) -> None:
    found = read_trace(written(tmp_path, MOONCAKE), TraceFormat.MOONCAKE)
    assert found == [
        TraceEntry(0.0, 6955, 52, (46, 47, 48)),
        TraceEntry(pytest.approx(3.053), 600, 26, (46, 2354)),  # type: ignore[arg-type]
    ]


@pytest.mark.parametrize("layout", ["list", "indented list", "lines"])
def test_sharegpt(tmp_path: Path, layout: str) -> None:
    data = [turns("How are you?", "Well [enough], {thanks}."), {"conversations": []}, turns("Why\n?", "B" * 9)]
    lines = "\n".join(json.dumps(each) for each in data)
    texts = {"list": json.dumps(data), "indented list": json.dumps(data, indent=2), "lines": lines}
    found = read_trace(written(tmp_path, texts[layout]), TraceFormat.SHAREGPT)
    assert [(e.text, e.input_tokens, e.output_tokens) for e in found] == [("How are you?", 3, 6), ("Why\n?", 2, 3)]


def test_a_large_file_is_read_only_as_far_as_needed_and_in_linear_time(tmp_path: Path) -> None:
    many = ",\n".join(json.dumps(turns(f"question {number} " * 20, "answer " * 50)) for number in range(40_000))
    path = written(tmp_path, f"[{many}, this is not JSON")
    assert len(read_trace(path, TraceFormat.SHAREGPT, limit=100)) == 100
    began = time.perf_counter()
    with pytest.raises(TraceError, match=r"line 40000: not JSON|line 40001: not JSON"):
        read_trace(path, TraceFormat.SHAREGPT)
    assert time.perf_counter() - began < 10


def test_only_the_beginning_of_a_trace_is_taken(tmp_path: Path) -> None:
    path = written(tmp_path, AZURE)
    assert len(read_trace(path, TraceFormat.AZURE, limit=2)) == 2
    assert len(read_trace(path, TraceFormat.AZURE, seconds=1.0)) == 2


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (TraceFormat.AZURE, "a,b\n1,2\n", "line 1: the columns TIMESTAMP, ContextTokens, GeneratedTokens are needed"),
        (TraceFormat.AZURE, AZURE + "yesterday,1,1\n", "line 5: TIMESTAMP 'yesterday' is no date and time"),
        (TraceFormat.AZURE, AZURE + "2023-11-16 18:17:06,many,1\n", "line 5: ContextTokens must be a whole number"),
        (TraceFormat.AZURE, AZURE + "2023-11-16 18:17:06,1\n", "line 5: GeneratedTokens must be a whole number"),
        (
            TraceFormat.AZURE,
            AZURE + "2023-11-16 18:17:01,1,1\n",
            "line 5: it is earlier than the line before, by 4.980 s",
        ),
        (TraceFormat.AZURE, "TIMESTAMP,ContextTokens,GeneratedTokens\n", "holds no requests"),
        (TraceFormat.MOONCAKE, MOONCAKE + "{", "line 4: not JSON"),
        (TraceFormat.MOONCAKE, MOONCAKE + "[1]", "line 4: must be an object"),
        (TraceFormat.MOONCAKE, '{"input_length": 1, "output_length": 1}', "line 1: timestamp must be milliseconds"),
        (TraceFormat.MOONCAKE, '{"timestamp": 1, "input_length": -1, "output_length": 1}', "line 1: input_length"),
        (TraceFormat.MOONCAKE, '{"timestamp": 1, "input_length": 9, "output_length": 1e3}', "line 1: output_length"),
        (
            TraceFormat.MOONCAKE,
            '{"timestamp": 1, "input_length": 512, "output_length": 1, "hash_ids": [1, 2]}',
            "line 1: 2 hash_ids for 512 tokens",
        ),
        (
            TraceFormat.MOONCAKE,
            '{"timestamp": 1, "input_length": 512, "output_length": 1, "hash_ids": ["a"]}',
            "line 1: hash_ids must be a list of integers",
        ),
        (TraceFormat.SHAREGPT, '[\n{"conversations": 3}]', "line 2: `conversations` must be a list"),
        (TraceFormat.SHAREGPT, "[\n\n3]", "line 3: a conversation must be an object"),
        (TraceFormat.SHAREGPT, '[{"conversations": []},\n', "line 2: the file ends within its list"),
        (TraceFormat.SHAREGPT, '[{"conversations": []},\n{"conv', "line 2: not JSON"),
        (TraceFormat.SHAREGPT, "[]", "holds no requests"),
        (TraceFormat.AZURE, "a" * 200_000 + "\n", "line 1: field larger than field limit"),
        (TraceFormat.MOONCAKE, "[" * 100_000, "line 1: not JSON"),
        (TraceFormat.SHAREGPT, '[\n{"a":' + '{"a":' * 50_000, "line 2: not JSON"),
        (TraceFormat.SHAREGPT, "[\n" + "1" * 5000 + "]", "line 2: not JSON"),
    ],
)
def test_a_mistake_is_named_with_its_line(tmp_path: Path, kind: TraceFormat, text: str, message: str) -> None:
    with pytest.raises(TraceError) as caught:
        read_trace(written(tmp_path, text), kind)
    assert message in str(caught.value)


def test_a_missing_and_a_binary_file(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"cannot read .*: No such file"):
        read_trace(tmp_path / "none", TraceFormat.AZURE)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="is not UTF-8 text"):
        read_trace(tmp_path / "binary", TraceFormat.MOONCAKE)

"""Targets from a file; drivers and servers as real processes that are paused, continued and ended."""

import asyncio
import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.serving.machine import BusyMeter
from benchmarks.serving.processes import GroupProcess, TargetFailed
from benchmarks.serving.rounds import pause, resume
from benchmarks.serving.target_specs import (
    DEFAULT_FILE,
    BadSpec,
    Kind,
    Spec,
    read_specs,
    with_engine_flags,
    with_port,
)
from benchmarks.serving.targets import default_placeholders, running_target
from benchmarks.serving.workload import BenchRequest

DRIVER = """
from benchmarks.serving.drivers.closed_run import Progress
from benchmarks.serving.drivers.protocol import Channel, serve_steps

class Engine:
    def __init__(self):
        self.left = {}
    def add(self, job):
        self.left[job.key] = len(job.token_ids)
    def step(self):
        print("what an engine prints is no answer")
        done, self.left = self.left, {}
        return [Progress(key, tokens, True) for key, tokens in done.items()]

serve_steps(Engine(), Channel.of_process(), "echo 1")
"""
SERVER = """
import http.server, json, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, body):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        self.answer(json.dumps({"data": [{"id": "m"}]}).encode())
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.answer(b'data: {"choices": [{"text": "x", "finish_reason": null}]}\\n\\ndata: [DONE]\\n\\n')
    def log_message(self, *_):
        pass

http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
REQUESTS = [BenchRequest(key, " x" * (key + 1), (7,) * (key + 1), 4) for key in range(5)]


def python(code: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code, *arguments)


async def test_a_driver_serves_is_paused_and_ends(tmp_path: Path) -> None:
    spec = Spec("echo", Kind.DRIVER, python(DRIVER))
    async with running_target(spec, tmp_path, tmp_path) as target:
        assert target.version == "echo 1"
        (process,) = target.processes
        pause(target)
        answer = asyncio.create_task(target.run(REQUESTS, 2))
        assert not (await asyncio.wait([answer], timeout=0.2))[0]
        assert psutil.Process(process.popen.pid).status() == psutil.STATUS_STOPPED
        resume(target)
        records = await answer
        assert {record.key: record.num_tokens for record in records} == {key: key + 1 for key in range(5)}
        assert process.memory_bytes() > 1_000_000
    assert process.popen.returncode is not None


async def test_a_server_is_started_on_a_free_port(tmp_path: Path) -> None:
    spec = Spec("web", Kind.HTTP, python(SERVER, "{port}"), ready_path="/any", about="a server")
    async with running_target(spec, tmp_path, tmp_path) as target:
        records = await target.run(REQUESTS, 3)
    assert [(record.error, record.num_tokens) for record in records] == [(None, 1)] * 5


@pytest.mark.parametrize("kind", [Kind.DRIVER, Kind.HTTP])
async def test_a_target_that_ends_while_it_starts_says_why(tmp_path: Path, kind: Kind) -> None:
    spec = Spec("broken", kind, python("raise SystemExit('no such model')"))
    with pytest.raises(TargetFailed, match="code 1:\nno such model"):
        async with running_target(spec, tmp_path, tmp_path):
            pass


async def test_a_server_that_never_gets_ready_is_given_up(tmp_path: Path) -> None:
    spec = Spec("mute", Kind.HTTP, python("import time; time.sleep(60)"), start_timeout_s=0.3)
    begin = time.monotonic()
    with pytest.raises(TargetFailed, match="mute was not ready in 0 s"):
        async with running_target(spec, tmp_path, tmp_path):
            pass
    assert time.monotonic() - begin < 10


async def test_the_whole_group_ends_even_when_it_is_paused(tmp_path: Path) -> None:
    code = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_DFL)\n"
        "child = subprocess.Popen([sys.executable, '-c', "
        "'import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)'],"
        " stdout=subprocess.PIPE)\n"
        "child.stdout.read(1)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    process = GroupProcess(python(code), os.environ, tmp_path / "log", has_pipes=True)
    assert process.popen.stdout is not None
    child = psutil.Process(int(await asyncio.to_thread(process.popen.stdout.readline)))
    process.pause()
    await process.stop()
    assert process.popen.returncode is not None
    await asyncio.to_thread(psutil.wait_procs, [child], 5)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_the_file_of_targets_is_good() -> None:
    placeholders = default_placeholders(Path("/models/m"), 2, "/peers")
    names = ["tokenwire", "tokenwire-engine", "inprocess", "vllm", "openvino", "llama-q4", "transformers"]
    specs = {spec.name: spec for spec in read_specs(DEFAULT_FILE, placeholders, names)}
    assert specs["tokenwire"].engine_flags == ("--threads", "2", "--speculation", "off")
    assert "/models/m" in specs["vllm"].command
    assert specs["vllm"].env["OMP_NUM_THREADS"] == "2"
    assert "5123" in with_port(specs["llama-q4"].command, 5123)


def test_our_own_targets_need_no_peers() -> None:
    placeholders = default_placeholders(Path("m"), 1, None)
    assert len(read_specs(DEFAULT_FILE, placeholders, ["tokenwire", "inprocess", "transformers"])) == 3
    with pytest.raises(BadSpec, match=r"target vllm: .*'peers'"):
        read_specs(DEFAULT_FILE, placeholders, ["vllm"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[x]\nkind = "ftp"', "target x: kind must be one of tokenwire"),
        ('[x]\nabout = "none"', "target x: kind must be one of"),
        ('[x]\nkind = "http"\nurl = "u"\nurls = "v"', "target x: unknown fields urls"),
        ('[x]\nkind = "http"', "target x: an http server needs a command or a url"),
        ('[x]\nkind = "driver"', "target x: a driver needs a command"),
        ('[x]\nkind = "driver"\ncommand = ["{nothing}"]', "target x: '{nothing}' needs a placeholder"),
        ('[y]\nkind = "tokenwire"', "no target x in "),
    ],
)
def test_a_bad_target_is_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "targets.toml"
    file.write_text(text)
    with pytest.raises(BadSpec, match=message):
        read_specs(file, {}, ["x"])


@pytest.mark.parametrize(
    ("spec", "engine_flags", "command"),
    [
        (Spec("a", Kind.TOKENWIRE, engine_flags=("--threads", "2")), ("--threads", "2", "--overlap"), ()),
        (Spec("b", Kind.ENGINE), ("--overlap",), ()),
        (Spec("c", Kind.DRIVER, ("py", "inprocess_driver")), (), ("py", "inprocess_driver", "--overlap")),
        (Spec("d", Kind.DRIVER, ("py", "other")), (), ("py", "other")),
    ],
)
def test_flags_of_the_engine_go_to_our_engine_only(
    spec: Spec, engine_flags: tuple[str, ...], command: tuple[str, ...]
) -> None:
    changed = with_engine_flags(spec, ("--overlap",))
    assert (changed.engine_flags, changed.command) == (engine_flags, command)


async def test_time_that_a_process_uses_is_its_own(tmp_path: Path) -> None:
    meter = BusyMeter()
    code = "import time\nwhile time.process_time() < 0.5: pass\nprint(1, flush=True)\ntime.sleep(60)"
    process = GroupProcess(python(code), os.environ, tmp_path / "log", has_pipes=True)
    try:
        assert process.popen.stdout is not None
        await asyncio.to_thread(process.popen.stdout.readline)
        used = process.cpu_s()
        assert used >= 0.4
        # What it used is part of what all cores did, and is no neighbour's.
        busy = meter.look()
        assert 0 < busy <= 1
        assert meter.look(used) < busy
        assert meter.look(1e6) == 0.0
    finally:
        await process.stop()
    assert (process.cpu_s(), process.memory_bytes()) == (0, 0)

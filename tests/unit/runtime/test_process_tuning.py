"""Garbage collection of a process, asked of the real interpreter."""

import subprocess
import sys


def test_start_up_objects_are_left_alone_and_new_garbage_is_still_collected() -> None:
    program = (
        "import gc, weakref; from service_runtime.process_tuning import keep_start_up_objects, pause_collection\n"
        "class Node: pass\n"
        "def cycle():\n"
        "    node = Node(); node.me = node\n"
        "    return weakref.ref(node)\n"
        "pause_collection()\n"
        "print(gc.isenabled())\n"
        "keep_start_up_objects()\n"
        "garbage = cycle(); gc.collect()\n"
        "print(gc.get_freeze_count() > 1000, garbage() is None)\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "True", "True"]

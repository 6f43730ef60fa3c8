"""What a process asks of the interpreter once, at its start.

Must not know: what the process does.
"""

import gc

# Objects made between two collections of the young: the default of 700 is reached several times in a step.
YOUNG_OBJECTS = 20_000


def pause_collection() -> None:
    """Call first: while a service imports and builds, nearly all it makes is kept; looking through it is in vain."""
    gc.disable()


def keep_start_up_objects() -> None:
    """Call once everything is built: what exists now is never looked at by the garbage collector again.

    A collection that walks the modules of a service would come in the middle of a step.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 10, 10)
    gc.enable()

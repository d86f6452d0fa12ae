"""What Python's fork server imports before it forks anything: this is imported there, and nowhere else.

The fork server loads the modules that workers need, has one thread and no device, and ends with its launcher.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
from contextlib import suppress

from stagewright.runtime.launch.process import LOADED, follow_parent

SERVER = os.getpid()


def _has_opened_a_card() -> bool:
    """Whether something that was loaded opened CUDA's driver, which forks could not use then; asking opens nothing."""
    with suppress(OSError, AttributeError):
        count = ctypes.c_int()
        status = int(ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(count)))
        return status != 3  # CUDA_ERROR_NOT_INITIALIZED
    return False


if LOADED in os.environ:
    os.setsid()  # a signal to the launcher's group is for the launcher
    follow_parent()
    for name in os.environ[LOADED].split():
        with suppress(ImportError):  # workers will say what is missing, if they miss it
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # objects that stay are not touched again, and their memory stays shared
CAN_FORK = LOADED in os.environ and not _has_opened_a_card()

"""The compiled loops of local privacy read nothing beyond their input."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

AT_THE_END_OF_MEMORY = """
    import ctypes, mmap
    import numpy as np
    from sfumato.kernels.local import compiled as compiled_local

    protect = ctypes.CDLL(None).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for skip, width in {cases}:
        print("skip", skip, "width", width, flush=True)
        size = skip + -(-width // 8)
        length, page = {count} * size, mmap.PAGESIZE
        pages = -(-length // page)
        memory = mmap.mmap(-1, (pages + 1) * page)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        assert protect(start + pages * page, page, 0) == 0  # nobody may read this page
        data = np.frombuffer(memory, dtype=np.uint8, count=length, offset=pages * page - length)
        table = np.zeros((3, width), dtype=np.int32)
        rows = np.arange({count}, dtype=np.uint32) % 3
        compiled_local.add_bits(rows, data.reshape({count}, size), skip, table)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="pages are protected by another call there")
def test_nothing_is_read_beyond_the_records() -> None:
    """Records that end where memory ends: a read beyond them ends the process (SIGSEGV, −11).
    Vectors go 32 bytes at a time, and short records are shorter than that."""
    cases = [(1, 2), (1, 8), (2, 64), (2, 100), (2, 300), (2, 1024)]
    code = textwrap.dedent(AT_THE_END_OF_MEMORY.format(cases=cases, count=200))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr

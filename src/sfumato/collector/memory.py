"""How much memory a collector takes at most, from its settings.

Each part is a limit that the code enforces, times what was measured for one byte of it;
tests/attacks/test_memory.py attacks all of them at once.
"""

from __future__ import annotations

from sfumato.collector.settings import MEBIBYTE, Settings

KIBIBYTE = 1 << 10
ADMISSIONS = 2  # long uploads that are checked at a time

_PROCESS = 320 * MEBIBYTE  # Python, its libraries, the store's threads and their caches
_CONNECTION = 384 * KIBIBYTE  # what asyncio, h11 and uvicorn keep for one, in both directions
_TLS = 640 * KIBIBYTE  # more with TLS: asyncio's buffers, and OpenSSL's
_UPLOAD = 1 * KIBIBYTE  # of one that waits, beside its body
_ADMISSION = 64 * MEBIBYTE  # tables that are unpacked at a time, and what is made of them
_ADMISSION_TIMES = 10  # an upload, in indices and copies
_STUDY_TIMES = 56  # a request for a study: items of 4 letters, while they are planned
_TABLE_TIMES = 64  # the largest message of a device: sums of tables and their noise
_SEAL = 64 * MEBIBYTE  # reports that the worker seals at a time
_PARTITION = 320 * MEBIBYTE  # records that the worker moves to the lake at a time, in copies
_SIGN_IN = 16 * KIBIBYTE  # the form of somebody who has not signed in


def memory_bound(settings: Settings) -> dict[str, int]:
    """The most bytes of each part. Their sum bounds the process, whatever strangers send and
    whatever studies people with a token ask for; docs/guides/deploy.md says what is not in it."""
    each = _CONNECTION if settings.tls_cert is None else _CONNECTION + _TLS
    largest = max(settings.queue_bytes, settings.upload_bytes)
    return {
        "process": _PROCESS,
        "connections": settings.connections * (each + _SIGN_IN),
        "uploads": 2 * largest
        + ADMISSIONS * (_ADMISSION + _ADMISSION_TIMES * settings.upload_bytes),
        "queue": 2 * (settings.queue_bytes + settings.queue_uploads * _UPLOAD)
        + 4 * settings.commit_bytes,
        "studies": (2 + _STUDY_TIMES) * settings.study_bytes,
        "contents": 2 * settings.study_bytes,
        "worker": _SEAL
        + _TABLE_TIMES * settings.upload_bytes
        + (0 if settings.lake is None else _PARTITION),
    }

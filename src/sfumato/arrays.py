"""Short names for the types of arrays."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bool = npt.NDArray[np.bool_]
F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
Whole = npt.NDArray[np.integer]

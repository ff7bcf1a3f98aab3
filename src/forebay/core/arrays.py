"""The array types that the core deals in."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]
"""Block ids or slot numbers, one-dimensional."""

Steps = NDArray[np.int64]
"""Step numbers, one-dimensional."""

EMPTY_IDS: Ids = np.empty(0, np.int32)
EMPTY_IDS.flags.writeable = False

from __future__ import annotations

import sys
from pathlib import Path

# The toy engine and the invariants are shared with the tests of the core.
sys.path.append(str(Path(__file__).resolve().parent.parent / "core"))

from __future__ import annotations

import sys
from pathlib import Path

# The server over a tiny model is shared with the tests of the server.
sys.path.append(str(Path(__file__).resolve().parents[1] / "server"))

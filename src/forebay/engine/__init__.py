"""The reference engine: Hugging Face decoders over a paged pool, on CPU or GPU."""

import os

# OpenMP threads that spin while they wait take the cores from the threads that copy: on two busy
# cores a decode step is seven times as long. Counts only if set before torch is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

"""One thread: sums do not depend on how they are split, and processes do not fight for two cores."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

"""What notebook 09 shows: profiling."""

import os

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or torch's profiler prints its start and its stop into a cell

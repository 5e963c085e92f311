"""Labs on fast PyTorch training: one module per experiment; what they share is in `labs.kit`."""

import sys

# A terminal of another encoding than UTF-8 lacks signs that sources and names of people have: "?" then stands for
# them, and no command ends for it. The streams of a notebook know no encoding.
for stream in (sys.stdout, sys.stderr):
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="replace")

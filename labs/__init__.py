"""Labs on fast PyTorch training: one module per experiment. `python -m labs` lists them.

exercises/, claims/ and explorers/ hold what each notebook uses, chapters/ what older ones still show,
common/ what two or more experiments use, kit/ the platform that starts and
measures them, classroom/ what an instructor runs, data/ what is trained on. Imports point one way: notebooks,
chapters, experiments, parts, kit.
"""

import sys

# A terminal of another encoding than UTF-8 lacks signs that sources and names of people have: "?" then stands for
# them, and no command ends for it. The streams of a notebook know no encoding.
for stream in (sys.stdout, sys.stderr):
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="replace")

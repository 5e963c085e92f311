"""Labs on fast PyTorch training: one module per experiment. `python -m labs` lists them.

common/ holds code that several experiments use, kit/ the platform that starts and measures them, recipes/ whole
programs to take home, classroom/ the instructor's tools. exercises/, claims/ and explorers/ belong to the notebooks.
Imports point one way: notebooks, exercises, experiments, common, kit.
"""

import sys

# A terminal whose encoding isn't UTF-8 can't print every character in our sources and authors' names. Print "?" instead
# of raising UnicodeEncodeError. Notebook streams have no reconfigure().
for stream in (sys.stdout, sys.stderr):
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="replace")

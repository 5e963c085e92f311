"""python -m labs.symptom"""

from labs.kit.cli import closed_pipe_is_no_error
from labs.symptom import main

with closed_pipe_is_no_error():
    main()

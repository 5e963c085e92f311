"""How long things may take before they are stopped, in seconds: the course's one table.

Each is a multiple of what is usual, since a busy machine is several times slower.
"""

LAUNCH_S = 240.0  # a launch from a notebook, from start to end
COMMAND_S = 600.0  # the same from a shell; and a collective
FUNCTION_S = 90.0  # `run_on_ranks`, also within an exercise
EXERCISE_S = 120.0  # a learner's answer, with all the ranks that it is tried on
CELL_S = 300.0  # a cell of a notebook that `make course` or `make notebooks` runs
BLOCK_S = 120.0  # a block of steps of a script that takes turns with others
DOCTOR_S = 200.0  # one run of the doctor on a sample script
IMPORT_S = 90.0  # until a new process has loaded torch
CHILD_S = 60.0  # a process that an experiment starts, and what it waits for there
STOP_S = 8.0  # from SIGTERM or Ctrl-C to SIGKILL

"""The course's timeouts, in seconds.

Each is several times the usual duration, because a busy machine is that much slower.
"""

LAUNCH_S = 240.0  # a launch from a notebook, from start to end
COMMAND_S = 600.0  # a launch from a shell; also a collective
FUNCTION_S = 90.0  # `run_on_ranks`, also within an exercise
EXERCISE_S = 120.0  # a learner's answer, on all the ranks that try it
CELL_S = 300.0  # a notebook cell run by `make course` or `make notebooks`
BLOCK_S = 120.0  # a block of steps of a script that is interleaved with others
DOCTOR_S = 200.0  # one run of the doctor on a sample script
IMPORT_S = 90.0  # until a new process has loaded torch
CHILD_S = 60.0  # a process that an experiment starts, and what it waits for there
STOP_S = 8.0  # from SIGTERM or Ctrl-C to SIGKILL

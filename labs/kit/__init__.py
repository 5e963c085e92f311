"""The platform that experiments stand on; nothing here knows one. This package imports nothing by itself.

    errors           input that cannot work, told in one line
    requirements     packages that must be there, and the oldest torch, from pyproject.toml
    host, nvml       cores, memory and limits of this process; the driver's view of the GPUs
    hardware         a device for each rank; torch's build; datasheet peaks (gpus.toml)
    measure          timing, intervals, comparisons
    record           measurements as JSON lines, with their provenance
    lab              an experiment's module and its Config
    rank             a rank's device, process group and records; `restart`: after torchrun has restarted it
    supervise        start processes, watch them, end them, leave none behind
    fork_server      what a launching process keeps for its runs
    rank_process     what runs in the process of each rank
    failure          which rank failed first, and how
    monitor          what the machine did meanwhile
    display          progress in a cell or terminal, sentences and tables
    launch           all of this: run an experiment, or a function, on ranks
    cli              the same from a shell, and under torchrun
    plot             figures
    check, answers   predictions and exercises; what checkers ask of an answer
    exercise         the schema of an exercise, and how an answer is compared with the reference
    notebook         the ten names that a notebook uses
    stability        how often an experiment gives the same answer
    claims           claims on trial (claims.toml)
    room             what a learner keeps for the instructor
    preflight        is this machine ready?
    course, rerun    run notebooks: for a page of results (`notebook_report`), in place for a commit (`fingerprint`)

No module imports one that imports it: a test looks, inside functions, too.
"""

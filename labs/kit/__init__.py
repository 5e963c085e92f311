"""The platform under the experiments, which it doesn't know. This package imports nothing by itself.

    errors           report bad input in one line
    requirements     the torch that is installed, and the oldest one the course can use
    host, nvml       cores, memory and limits of this process; the driver's view of the GPUs
    hardware         a device for each rank; torch's build; datasheet peaks (gpus.toml)
    measure          timing, intervals, comparisons
    record           measurements as JSON lines, with their provenance
    lab              an experiment's module and its Config
    rank             a rank's device, process group and records; `restart`: after torchrun has restarted it
    supervise        start processes, watch them, end them, leave none behind
    fork_server      a launching process's fork server and folder
    rank_process     code that runs in each rank's process
    failure          which rank failed first, and how
    monitor          sample the machine during a run
    display          progress in a cell or terminal, sentences and tables
    launch           run an experiment, or a function, on ranks
    cli              the same from a shell, and under torchrun
    plot             figures
    check, answers   predictions and exercises; checks of a learner's function
    exercise         the schema of an exercise, and the comparison of an answer with the reference
    notebook         the ten names that a notebook uses
    stability        count how often an experiment gives the same answer
    claim_records    the records behind the verdicts on claims
    room             a shared folder that collects learners' results for the instructor
    preflight        check whether this machine is ready
    course, rerun    run notebooks: for a page of results (`notebook_report`), in place for a commit (`fingerprint`)

No module imports one that imports it. A test checks this, including imports inside functions.
"""

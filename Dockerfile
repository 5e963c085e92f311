# JupyterLab with the course, as a user without privileges. Works with and without GPUs:
#
#   docker build -t gpu-training-course .
#   docker run --rm -it -p 127.0.0.1:8888:8888 --shm-size=2g gpu-training-course
#   docker run --rm -it -p 127.0.0.1:8888:8888 --shm-size=2g --gpus all gpu-training-course
#
# --shm-size: DataLoader workers and NCCL exchange data through /dev/shm. Docker's default of 64 MB ends in a
# "bus error" or an NCCL failure as soon as batches are real.
# --gpus all: needs the NVIDIA driver and container toolkit on the host. CUDA itself comes with torch.
# The token is random and printed at start; set your own with -e JUPYTER_TOKEN=...
#
# Build arguments: PIP_ARGS adds pip options (without a GPU, the CPU build of torch is a tenth of the download: see
# docs/INSTALL.md), UID gives the user in the container your own id, for folders that you mount (default 1000), BASE is any
# Debian image with Python 3.11 or later and its venv module, EXTRAS=course,test brings what the tests need, too. Built for
# real, with the tests, by tests/container/check.sh.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}

# What pip cannot install: NCCL opens libibverbs for InfiniBand and RoCE, and without it takes TCP; torch.compile needs
# a compiler.
RUN apt-get update \
    && apt-get install -y --no-install-recommends libibverbs1 ibverbs-providers g++ \
    && rm -rf /var/lib/apt/lists/*

# The labs' preflight reports on this user's limits, and files written to mounted folders should not be root's.
ARG UID=1000
RUN useradd --create-home --shell /bin/bash --uid ${UID} learner \
    && install --directory --owner=learner --group=learner /home/learner/course
USER learner
WORKDIR /home/learner/course

# SHELL is what JupyterLab's terminals run. No make here: its targets would install everything a second time.
ENV PATH=/home/learner/venv/bin:$PATH \
    SHELL=/bin/bash \
    JUPYTER_PREFER_ENV_PATH=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

# The packages come before the sources: an edited notebook does not install torch again.
RUN python3 -m venv /home/learner/venv
COPY --chown=learner:learner pyproject.toml constraints.txt README.md LICENSE ./
COPY --chown=learner:learner labs/__init__.py labs/__init__.py
ARG PIP_ARGS=""
ARG EXTRAS=course
RUN python -m pip install ${PIP_ARGS} -c constraints.txt -e ".[${EXTRAS}]"
COPY --chown=learner:learner . .

EXPOSE 8888
CMD ["python", "-m", "labs.start", "--ip=0.0.0.0", "--port=8888", "--no-browser"]

# Everything starts here. The only needs are make and Python 3.11 or later; see README.md.

PYTHON ?=
START ?= 00
LAB_ARGS ?=
PIP_ARGS ?=
ARGS ?=

PY := .venv/bin/python
READY := .venv/.ready
TESTS_READY := .venv/.tests-ready
BOOK_PY := .venv-book/bin/python
BOOK_READY := .venv-book/.ready

# A kernel must run in .venv, whatever kernels this user has installed elsewhere.
export JUPYTER_PREFER_ENV_PATH := 1
unexport JUPYTER_PATH
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help lab course gpu slides book test test-all drills notebooks constraints clean moved

help:
	@echo "make lab     JupyterLab on your own copies of the notebooks, in my/ (START=03 opens that one,"
	@echo "             LAB_ARGS='--no-browser --port 9000' are JupyterLab's options)"
	@echo "make course  run every notebook into build/ and write build/index.html (ARGS='-p NPROC 1' sets a parameter)"
	@echo "make gpu     on a machine with a GPU: check it and record what notebooks show, with the Python and torch that are"
	@echo "             there (ARGS='--list' prints the tasks; PYTHON=python3.12 picks the Python)"
	@echo "make test    lint, the quick tests, and every notebook with smoke runs in place of its experiments: some 10 minutes"
	@echo "make test-all  lint, then every test and every notebook at full length: an hour and more"
	@echo "make drills  only the tests that kill, fill a disk, corrupt, hang or interrupt"
	@echo "make slides  slides of every notebook in build/slides, without a network (ARGS='--solutions 03.1', '--source build')"
	@echo "make book    a static site of all notebooks, with their committed outputs, in build/book; needs no torch (in .venv-book)"
	@echo "make clean   remove build/ and caches; .venv and my/ stay"
	@echo "Each installs into .venv first if needed: PYTHON=python3.12 picks the Python, PIP_ARGS adds pip options."

# exec: a signal for make's child then reaches Python, not a shell that would leave it running.
lab: $(READY)
	@echo "== JupyterLab: open the link with 'token' below if no browser opens. Ctrl-C stops it."
	@exec $(PY) -m labs.start "$(START)" $(LAB_ARGS)

course: $(READY)
	@echo "== Run every notebook into build/"
	@exec $(PY) -m labs.kit.course $(ARGS)

# No .venv: the torch that is there knows the GPU.
gpu:
	@exec $(or $(PYTHON),python3) -m labs.gpu $(ARGS)

slides: $(READY)
	@echo "== Write the slides into build/slides"
	@exec $(PY) -m labs.classroom.slides $(ARGS)

book: $(BOOK_READY)
	@echo "== Build the book from the committed notebooks: open build/book/index.html"
	@$(BOOK_PY) book $(ARGS)

LINT = $(PY) -m ruff check . && $(PY) -m ruff format --check .
# tests/strict holds no test: it is named so that tests/conftest.py is read, while thousands of tests are not.
# Strict outputs must be the same in another time zone and locale and with another instruction set than they were made in.
OTHER_PLACE = TZ=Asia/Kathmandu LC_ALL=C ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41
NOTEBOOKS = $(PY) -m pytest --nbval --nbval-current-env --nbval-cell-timeout=270 -m notebook notebooks tests/strict
QUICK = $(PY) -m pytest -m "not drill and not long and not quiet"
QUIET = $(PY) -m pytest -m "quiet and not drill and not long"
FOUR = -n 4 --dist loadfile --no-loadscope-reorder
# SECOND_LOOK=1, for CI: tests that failed run once more, alone and in a new process. A fault of the code fails again; one
# that a busy neighbour turned red is listed in the log, to be mended, and holds nobody up meanwhile.
SECOND_LOOK ?=
LOOK_AGAIN = $(if $(SECOND_LOOK),|| { [ $$? = 1 ] && echo "== What failed above once more and alone: mend it even if it passes" && \
	$(1) --last-failed --last-failed-no-failures=none tests; })

test: $(TESTS_READY)
	@echo "== Lint"
	$(LINT)
	@echo "== Quick tests of the kit, labs, exercises and repository, four at a time"
	$(QUICK) $(FOUR) tests $(ARGS) $(call LOOK_AGAIN,$(QUICK))
	@echo "== Tests that measure, one by one"
	$(QUIET) tests $(ARGS) $(call LOOK_AGAIN,$(QUIET))
	@echo "== Every notebook, in short, against its committed outputs, two at a time"
	COURSE_SMOKE=1 $(OTHER_PLACE) $(NOTEBOOKS) -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

test-all: $(TESTS_READY) $(BOOK_READY)
	@echo "== Lint"
	$(LINT)
	@echo "== Every test of the kit, labs, exercises and repository, long ones too, four at a time"
	$(PY) -m pytest -m "not drill and not quiet" $(FOUR) tests $(ARGS)
	@echo "== Drills, and tests that measure, one by one"
	$(PY) -m pytest -m "drill or quiet" tests $(ARGS)
	@echo "== Every notebook at full length against its committed outputs"
	$(NOTEBOOKS) $(ARGS)

drills: $(TESTS_READY)
	@echo "== Whatever is killed, filled, corrupted, hung or interrupted: nothing is lost and nothing stays behind"
	$(PY) -m pytest -m drill tests $(ARGS)

# For maintainers: outputs of one run of this code, in place. Nothing else should run meanwhile: the cells measure.
notebooks: $(READY)
	@echo "== Run the notebooks whose cells or code have changed, and keep their outputs"
	@$(PY) -m labs.kit.rerun $(or $(ARGS),--stale)

# For maintainers: the newest versions that pyproject.toml allows, without the CUDA libraries that torch pins itself. torch
# stays: launch() rides on its elastic agent and fork server. Change it in constraints.txt by hand, and test.
constraints: $(READY)
	@echo "== Install the newest versions into build/newest and write them to constraints.txt"
	@$(PY) -m venv --clear build/newest
	@grep '^torch==' constraints.txt > build/torch.txt
	@build/newest/bin/python -m pip install $(PIP_ARGS) -c build/torch.txt -e '.[course,test]'
	@grep '^#' constraints.txt > build/constraints.txt
	@build/newest/bin/python -m pip freeze --all --exclude-editable --exclude pip | sed -e 's/^\(torch==[^+]*\)+.*/\1/' \
		-e '/^nvidia-ml-py==/!{/^nvidia-/d;}' -e '/^triton==/d' -e '/^cuda-/d' >> build/constraints.txt
	@mv build/constraints.txt constraints.txt
	@echo "== The same for the book, into book/constraints.txt"
	@$(PY) -m venv --clear build/newest
	@build/newest/bin/python -m pip install --upgrade $(PIP_ARGS) pip
	@build/newest/bin/python -m pip install $(PIP_ARGS) --group book
	@grep '^#' book/constraints.txt > build/constraints.txt
	@build/newest/bin/python -m pip freeze --all --exclude setuptools >> build/constraints.txt
	@mv build/constraints.txt book/constraints.txt

clean:
	@echo "== Remove build/ and caches"
	@rm -rf build .cache .pytest_cache .ruff_cache gpu_training_course.egg-info
	@find . \( -path "./.venv*" -o -path ./my \) -prune -o \( -name __pycache__ -o -name .ipynb_checkpoints \) -type d -prune -exec rm -rf {} +

# Sets $found to the first Python that will do.
define FIND_PYTHON
found=; for p in $(if $(PYTHON),"$(PYTHON)",python3 python3.14 python3.13 python3.12 python3.11 python); do \
		if "$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then found=$$p; break; fi; done; \
	if [ -z "$$found" ]; then \
		echo "Python 3.11 or later is needed$(if $(PYTHON), ($(PYTHON) is absent or older)): install it or name it, as in 'make $(MAKECMDGOALS) PYTHON=/path/to/python3.12'." >&2; exit 1; fi; \
	if ! "$$found" -c 'import venv, ensurepip' 2>/dev/null; then \
		echo "$$found has no venv module: on Debian and Ubuntu, 'sudo apt install python3-venv', then run make again." >&2; exit 1; fi
endef

# .ready holds the folder it was made for: a virtual environment that was moved or copied is made again.
ifneq "$(shell cat $(READY) 2>/dev/null)" "$(CURDIR)"
$(READY): moved
endif

$(READY): pyproject.toml constraints.txt
	@if [ -L .venv ]; then echo ".venv is a link, and what it leads to would be emptied: remove the link and run make again." >&2; exit 1; fi
	@$(FIND_PYTHON); \
	if [ "$$(cat $(READY) 2>/dev/null || pwd)" != "$(CURDIR)" ] || ! $(PY) -c '' 2>/dev/null; then \
		echo "== Create .venv with $$($$found --version)"; "$$found" -m venv --clear .venv || exit 1; fi
	@echo "== Install into .venv: a few minutes the first time"
	@$(PY) -m pip install $(PIP_ARGS) -c constraints.txt -e '.[course]'
	@printf '%s\n' "$(CURDIR)" > $(READY)

$(TESTS_READY): $(READY)
	@echo "== Install what the tests need into .venv"
	@$(PY) -m pip install $(PIP_ARGS) -c constraints.txt -e '.[course,test]'
	@touch $(TESTS_READY)

# The book needs no torch, and none of its packages belong into a learner's environment: it has one of its own.
# pip learned dependency groups in 25.1.
$(BOOK_READY): pyproject.toml book/constraints.txt
	@$(FIND_PYTHON); \
	echo "== Create .venv-book with $$($$found --version)"; "$$found" -m venv --clear .venv-book
	@echo "== Install into .venv-book: a minute the first time"
	@$(BOOK_PY) -m pip install --quiet $(PIP_ARGS) -c book/constraints.txt pip
	@$(BOOK_PY) -m pip install $(PIP_ARGS) -c book/constraints.txt --group book
	@touch $(BOOK_READY)

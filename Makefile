# `make book` renders the book, `make test` checks everything. README.md gives the plain commands.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
INSTALLED := $(VENV)/installed

# Waiting threads sleep and leave the cores to others; chapters run the same way.
export OMP_WAIT_POLICY = PASSIVE

.PHONY: help book test run check lab lint clean render

help:
	@echo "make book    install, render the book, say where to open it   (about 3 minutes the first time)"
	@echo "make test    unit tests, every chapter under nbval, the pages in Chromium"
	@echo "make run     execute every chapter again and write the notebooks"
	@echo "make check   say which chapters are stale"
	@echo "make lab     open the chapters in JupyterLab"
	@echo "make lint    ruff over library, tests and chapters"
	@echo "make clean   remove the rendered book and caches, but not the environment"

$(INSTALLED): requirements.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed, and $(PYTHON) is " + sys.version.split()[0] + "; name another: make PYTHON=python3.12 $(MAKECMDGOALS)")'
	@echo "Installing into $(VENV): about 2 minutes and 1.5 GB, more where torch brings CUDA."
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --disable-pip-version-check -r requirements.txt
	@touch $@

# From scratch, so that a warning shows each time and not only when its page has changed.
render: $(INSTALLED)
	$(VENV)/bin/jupyter-book build . --all -W -n --keep-going

book: render
	@echo "The book is ready. Open in a browser: $(CURDIR)/_build/html/index.html"

# Two runs of pytest, because Playwright's event loop and nbval's do not share a process.
test: render
	@echo "Testing. Chapters print a dot for each cell; the whole takes as long as the chapters do."
	@if $(RUN) tests/browser/chromium.py; then \
	  $(RUN) -m pytest tests/browser || exit 1; \
	elif [ -n "$$CI" ]; then \
	  exit 1; \
	fi
	$(RUN) -m pytest --nbval --durations=10 tests book
	@$(RUN) tests/browser/chromium.py > /dev/null || echo "BROWSER TESTS NOT RUN."

run: $(INSTALLED)
	$(RUN) -m glm_course.book run

check: $(INSTALLED)
	$(RUN) -m glm_course.book check

lab: $(INSTALLED)
	$(VENV)/bin/jupyter lab book

lint: $(INSTALLED)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

clean:
	rm -rf _build .pytest_cache .ruff_cache .hypothesis

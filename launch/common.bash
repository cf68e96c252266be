# What the launch scripts share; each of them sources it.
# shellcheck shell=bash disable=SC2034  # variables are set here for the scripts

fail() {
  printf 'error: %s\n' "$*" >&2
  exit 2
}

# read_arguments "$@": sets config, dry_run (1 or empty) and options, what follows for sdpo-scale.
read_arguments() {
  dry_run='' config='' options=()
  local word
  for word in "$@"; do
    case $word in
      --dry-run) dry_run=1 ;;
      *) if [[ -z $config ]]; then config=$word; else options+=("$word"); fi ;;
    esac
  done
  [[ -n $config && $config != -* ]] || fail "the first argument is a config: $0 CONFIG.yaml"
  [[ $config == demo || -f $config ]] || fail "config file '$config' does not exist"
}

gpus_of_this_node() {
  if [[ -n ${NPROC_PER_NODE:-} ]]; then
    echo "$NPROC_PER_NODE"
  elif [[ -n ${CUDA_VISIBLE_DEVICES:-} ]]; then
    tr ',' '\n' <<< "$CUDA_VISIBLE_DEVICES" | grep -c .
  elif command -v nvidia-smi > /dev/null; then
    nvidia-smi --list-gpus | grep -c .
  else
    fail "cannot count this node's GPUs without nvidia-smi: set NPROC_PER_NODE"
  fi
}

# An address that means another machine on every node lets each node wait for itself.
refuse_loopback() {
  case $1 in
    '' | localhost* | 127.* | ::1 | 0.0.0.0)
      fail "$2 is '$1': several nodes need a name or address of one of them that all can reach"
      ;;
  esac
}

# Where the process on this node is to listen on a port that something else holds, says what.
refuse_used_port() {
  python - "$1" << 'END' || exit 2
import socket
import sys

port = int(sys.argv[1])
with socket.socket() as probe:
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        probe.bind(("", port))
        sys.exit(0)
    except OSError:
        owner = "a process of another user"
try:
    import psutil

    for connection in psutil.net_connections("tcp"):
        if connection.laddr.port == port and connection.status == "LISTEN" and connection.pid:
            owner = f"process {connection.pid} ({psutil.Process(connection.pid).name()})"
except (ImportError, psutil.Error):
    pass
sys.exit(
    f"error: port {port} of this node is in use by {owner}: set MASTER_PORT to a free one, "
    "the same on every node"
)
END
}

free_port() {
  python -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])'
}

# Prints words as a command that a shell would read the same way.
show_command() {
  printf '%q ' "$@"
  printf '\n'
}

# What `--dry-run` does after the command was shown: the plan, in one process and on no GPU.
plan() {
  python -m sdpo_scale train "$config" --dry-run --world-size "$1" "${options[@]}"
}

# Runs a launcher so that SIGTERM reaches it, and sets code: 143 if that came. Ranks have finished
# their step and saved by then, and schedulers start a job again that ends with it.
run_forwarding_signals() {
  local stopped='' child
  trap 'stopped=1; kill -TERM "$child" 2> /dev/null || true' TERM
  trap : INT # the terminal sends it to the launcher as well
  "$@" &
  child=$!
  while :; do
    code=0
    wait "$child" || code=$?
    kill -0 "$child" 2> /dev/null || break # wait returns early when a signal comes
  done
  if [[ -n $stopped ]]; then code=143; fi
}

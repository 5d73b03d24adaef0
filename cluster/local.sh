#!/usr/bin/env bash
# A cluster of several nodes on this one machine, for trying out what a real one does.
#
#   cluster/local.sh start [workers]   a head without CPUs and so many more nodes (2)
#   cluster/local.sh status            what Ray says of it
#   cluster/local.sh stop              ends what `start` started, and nothing else
#
# It costs nothing per hour. The dashboard, which takes jobs, listens on 127.0.0.1. Ray's other ports listen on
# all addresses and ask for the token too. Jobs go to it with `ray job submit`; `start` prints how.
#
# Environment: CPUS_PER_NODE (2), RAY_PORT (6379), DASHBOARD_PORT (8265), OBJECT_STORE_MB of every node (512),
# CLUSTER_DIR (a short path of your own, for logs and sockets), RAY_AUTH_TOKEN_PATH (~/.ray/auth_token, made if
# absent), MOE_FRONTIER_HOME (./runs).
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
bin="$root/.venv/bin"
folder="$(realpath -m "${CLUSTER_DIR:-/tmp/moe-ray-$(id -u)}")"
port="${RAY_PORT:-6379}"
dashboard="http://127.0.0.1:${DASHBOARD_PORT:-8265}"
export RAY_AUTH_MODE=token
export RAY_AUTH_TOKEN_PATH="${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}"
home="${MOE_FRONTIER_HOME:-$root/runs}" # absolute, if it is no URI: jobs run in folders of their own
[[ "$home" == *://* ]] || home="$(realpath -m "$home")"
export MOE_FRONTIER_HOME="$home"
export RAY_USAGE_STATS_ENABLED="${RAY_USAGE_STATS_ENABLED:-0}"
export MLFLOW_DISABLE_TELEMETRY="${MLFLOW_DISABLE_TELEMETRY:-true}"
unset RAY_ADDRESS # of another cluster, which these commands would talk to

fail() {
    echo "error: $*" >&2
    exit 1
}

[[ -x "$bin/ray" ]] || fail "$bin has no ray: run \`make setup\` first"

# Prints the processes of this cluster. All of them, jobs too, inherit its mark from `ray start`.
processes() {
    "$bin/python" - "$folder" <<'PYTHON'
import sys
import psutil

for process in psutil.process_iter():
    try:
        if process.environ().get("MOE_FRONTIER_LOCAL_CLUSTER") == sys.argv[1]:
            print(process.pid)
    except psutil.Error:
        pass  # gone meanwhile, or another user's
PYTHON
}

# True once so many nodes are alive and the head takes jobs.
ready() {
    "$bin/python" - "$dashboard" "$1" 2> "$folder/ready.log" <<'PYTHON'
import sys
from ray.job_submission import JobSubmissionClient
from ray.util.state import list_nodes

dashboard, count = sys.argv[1:]
JobSubmissionClient(dashboard).list_jobs()
alive = [node for node in list_nodes(address=dashboard) if node.state == "ALIVE"]
sys.exit(f"{len(alive)} of {count} nodes" if len(alive) < int(count) else 0)
PYTHON
}

make_token() {
    if [[ -e "$RAY_AUTH_TOKEN_PATH" ]]; then
        [[ ! -O "$RAY_AUTH_TOKEN_PATH" ]] || chmod 600 "$RAY_AUTH_TOKEN_PATH" # Ray itself makes it 0644
        return
    fi
    mkdir -p "$(dirname "$RAY_AUTH_TOKEN_PATH")"
    (umask 077 && "$bin/python" -c 'import secrets; print(secrets.token_hex(32), end="")' \
        > "$RAY_AUTH_TOKEN_PATH")
    echo "made a token: $RAY_AUTH_TOKEN_PATH"
}

how_to_use() {
    cat > "$folder/env" <<ENV
export RAY_ADDRESS=$dashboard
export RAY_AUTH_MODE=token
export RAY_AUTH_TOKEN_PATH=$RAY_AUTH_TOKEN_PATH
export PATH=$bin:\$PATH
ENV
    cat <<HELP
dashboard  $dashboard (it asks for the token)
logs       $folder/ray/session_latest/logs of the head and of jobs, $folder/<n>/.. of the nodes

source $folder/env   # or these lines:
$(cat "$folder/env")
ray job submit --working-dir . -- python jobs/pareto_sweep.py
HELP
}

start_node() {
    MOE_FRONTIER_LOCAL_CLUSTER="$folder" "$bin/ray" start "$@" \
        --object-store-memory=$((${OBJECT_STORE_MB:-512} * 1024 * 1024)) > "$folder/start.log" 2>&1 \
        || {
            cat "$folder/start.log" >&2
            stop > /dev/null
            fail "ray start failed; nothing of it is left running"
        }
}

start() {
    local workers="${1:-2}"
    [[ "$workers" =~ ^[1-9][0-9]*$ ]] || fail "workers: a number from 1 on, got '$workers'"
    (umask 077 && mkdir -p "$folder")
    [[ -O "$folder" ]] || fail "$folder is another user's: set CLUSTER_DIR to a short path of your own"
    if [[ -n "$(processes)" ]]; then
        echo "it runs already; \`$0 stop\` ends it"
        [[ -e "$folder/env" ]] && cat "$folder/env"
        return
    fi
    make_token
    echo "$port" > "$folder/port"
    echo "starting a head and $workers nodes with ${CPUS_PER_NODE:-2} CPUs each"
    start_node --head --num-cpus=0 --port="$port" --temp-dir="$folder/ray" \
        --dashboard-host=127.0.0.1 --dashboard-port="${dashboard##*:}"
    # A folder for each: nodes that share one unpack a job's code in the same place, and remove it under the job
    for ((node = 1; node <= workers; node++)); do
        start_node --address="127.0.0.1:$port" --num-cpus="${CPUS_PER_NODE:-2}" --temp-dir="$folder/$node"
    done
    for ((attempt = 0; attempt < 20; attempt++)); do
        ready $((workers + 1)) && break
        sleep 1
    done
    ready $((workers + 1)) || { cat "$folder/ready.log" >&2; stop; fail "the nodes did not come up"; }
    how_to_use
}

stop() {
    local left
    [[ -n "$(processes)" ]] || { echo "nothing of $folder runs"; return; }
    for signal in TERM TERM KILL KILL KILL; do # Ray's control server often outlives SIGTERM
        left="$(processes)"
        [[ -z "$left" ]] && break
        xargs -r kill -s "$signal" <<< "$left" 2> /dev/null || true
        sleep 2
    done
    left="$(processes)"
    [[ -z "$left" ]] || fail "still running: $(tr '\n' ' ' <<< "$left")"
    rm -f "$folder/env"
    echo "stopped; logs stay in $folder"
}

case "${1:-}" in
start) start "${2:-}" ;;
stop) stop ;;
status)
    [[ -n "$(processes)" ]] || fail "nothing of $folder runs: \`$0 start\` starts it"
    exec "$bin/ray" status --address="127.0.0.1:$(< "$folder/port")"
    ;;
*) fail "usage: $0 start [workers] | stop | status" ;;
esac

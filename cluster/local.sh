#!/usr/bin/env bash
# A cluster of several nodes on this one machine, for trying out what a real one does.
#
#   cluster/local.sh start [workers]   a head without CPUs and so many more nodes (2)
#   cluster/local.sh status            what Ray says of it
#   cluster/local.sh stop              ends what `start` started, and nothing else
#
# It costs nothing per hour, and runs beside any other Ray on this machine. All its ports listen on 127.0.0.1 alone,
# those of metrics too, which ask for no token. Jobs go to it with `ray job submit`; `start` prints how.
#
# Environment: CPUS_PER_NODE (2), OBJECT_STORE_MB of every node (512), RAY_PORT, DASHBOARD_PORT, RAY_CLIENT_PORT (the
# first free ports from 6379, 8265 and 10001 on), READY_S (180: seconds within which a first job must have succeeded),
# CLUSTER_DIR (a short path of your own, for logs and sockets), RAY_AUTH_TOKEN_PATH (~/.ray/auth_token, made if
# absent), MOE_FRONTIER_HOME (./runs), REDIS (host:port of a Redis without a password, which then holds the state of
# Ray's control server: if that dies, it is started again, and what runs goes on).
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
bin="$root/.venv/bin"
folder="$(realpath -m "${CLUSTER_DIR:-/tmp/moe-ray-$(id -u)}")"
# Jobs look up `python` with the PATH of `ray start`, which need not be that of an activated environment.
export PATH="$bin:$PATH"
export RAY_AUTH_MODE=token
export RAY_AUTH_TOKEN_PATH="${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}"
home="${MOE_FRONTIER_HOME:-$root/runs}" # absolute, if it is no URI: jobs run in folders of their own
[[ "$home" == *://* ]] || home="$(realpath -m "$home")"
export MOE_FRONTIER_HOME="$home"
export RAY_USAGE_STATS_ENABLED="${RAY_USAGE_STATS_ENABLED:-0}"
export MLFLOW_DISABLE_TELEMETRY="${MLFLOW_DISABLE_TELEMETRY:-true}"
export RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 # Ray's only setting by which every process takes 127.0.0.1 for its address
unset RAY_ADDRESS # of another cluster, which these commands would talk to

fail() {
    echo "error: $*" >&2
    exit 1
}

[[ -x "$bin/ray" ]] || fail "$bin has no ray: run \`make setup\` first"

# Prints the processes of this cluster. `processes end` ends them first, and prints those that still run. All of them,
# jobs too, inherit the mark from `ray start`. A job may start programs with an environment of their own, so the
# descendants of marked processes count as well.
processes() {
    "$bin/python" - "$folder" "${1:-}" <<'PYTHON'
import contextlib
import sys
import time
import psutil

folder, end = sys.argv[1:]


def marked(process, everyone):
    if process is None:
        return False
    mark = (process.info["environ"] or {}).get("MOE_FRONTIER_LOCAL_CLUSTER")
    return mark == folder or marked(everyone.get(process.info["ppid"]), everyone)


def runs(process):
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def find():
    everyone = {process.pid: process for process in psutil.process_iter(["ppid", "environ"])}
    return {process for process in everyone.values() if marked(process, everyone)}


# A process stays in the set once found: when its parent has ended, nothing shows its descent any more.
found = find()
terminated = set()
begin = time.monotonic()
while end and found and time.monotonic() < begin + 30:
    for process in found:
        with contextlib.suppress(psutil.Error):
            if time.monotonic() > begin + 4:
                process.kill()  # Ray's control server often outlives SIGTERM
            elif process not in terminated:
                process.terminate()
    terminated |= found
    time.sleep(0.2)
    found = {process for process in found | find() if runs(process)}
print(*sorted(process.pid for process in found))
PYTHON
}

# Prints the port that the variable $1 names; if it names none, the first free port from $2 on.
choose_port() {
    local asked="${!1:-}" free
    free="$("$bin/python" - "${asked:-$2}" <<'PYTHON'
import contextlib
import socket
import sys

for port in range(int(sys.argv[1]), 65536):
    with contextlib.suppress(OSError), socket.create_server(("", port)):
        print(port)
        break
PYTHON
    )"
    [[ -n "$free" && "$free" == "${asked:-$free}" ]] || fail "$1=$asked: this port is taken"
    echo "$free"
}

# Waits until $1 nodes are alive and a first job has succeeded.
wait_until_ready() {
    "$bin/python" - "$dashboard" "$1" "${READY_S:-180}" 2> "$folder/ready.log" <<'PYTHON'
import signal
import sys
import time
from ray.job_submission import JobStatus, JobSubmissionClient
from ray.util.state import list_nodes

dashboard, count, seconds = sys.argv[1], *map(int, sys.argv[2:])
missing = "the dashboard does not answer"
error = None
signal.signal(signal.SIGALRM, lambda *_: sys.exit(f"not ready after {seconds} s: {missing} (last error: {error})"))
signal.alarm(seconds)
while True:
    try:
        client = JobSubmissionClient(dashboard)
        alive = sum(node.state == "ALIVE" for node in list_nodes(address=dashboard))
        missing = f"{alive} of {count} nodes are alive"
        if alive >= count:
            missing = "no job can be submitted"
            job = client.submit_job(entrypoint="true")
            missing = "a first job does not finish"
            while not (status := client.get_job_status(job)).is_terminal():
                time.sleep(0.5)
            missing = client.get_job_info(job).message
            while job in [one.submission_id for one in client.list_jobs()]:
                client.delete_job(job)
                time.sleep(2)  # Ray's monitor of the job may list it once more, as failed
            if status == JobStatus.SUCCEEDED:
                break
    except Exception as last:
        error = last
    time.sleep(1)
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
export RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0
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

# Without SPT_NOENV, Ray overwrites a process's environment, and so the mark, when it sets the process's title. Port 0
# is any free one. By default the agents of every Ray on a machine listen on 52365, and no job starts without one; its
# workers choose from 10002 to 19999.
#
# `ray start` is called from Python, because with that address Ray admits no second node.
start_node() {
    MOE_FRONTIER_LOCAL_CLUSTER="$folder" SPT_NOENV=1 "$bin/python" -c '
from ray._private import ray_constants, services
ray_constants.ENABLE_RAY_CLUSTER = True
services.get_node_ip_address = lambda address=None: "127.0.0.1"
from ray.scripts.scripts import main
main()' start "$@" \
        --dashboard-agent-listen-port=0 --min-worker-port=0 --max-worker-port=0 \
        --object-store-memory=$((${OBJECT_STORE_MB:-512} * 1024 * 1024)) > "$folder/start.log" 2>&1 \
        || {
            cat "$folder/start.log" >&2
            stop > /dev/null
            fail "ray start failed; nothing of it is left running"
        }
}

# Starts the control server of port $1 again whenever it has died, as Ray started it: Ray itself never does.
keep_control_server() {
    local pid command environment
    pid="$(pgrep -f "/gcs_server .*--gcs_server_port=$1 ")"
    mapfile -d '' command < "/proc/$pid/cmdline"
    mapfile -d '' environment < "/proc/$pid/environ"
    while true; do
        tail --pid="$pid" -f /dev/null
        sleep 1
        echo "$(date --utc +%FT%TZ) the control server died: starting it again"
        env -i "${environment[@]}" "${command[@]}" &
        pid=$!
    done
}

# Fails if the head or its dashboard has died and left other processes behind, or has not come up yet.
check_head() {
    local port
    for port in $(< "$folder/ports"); do
        (: <> "/dev/tcp/127.0.0.1/$port") 2> /dev/null \
            || fail "the head of $folder does not answer: \`$0 stop\` ends what is left of it, \`$0 start\` starts it anew"
    done
}

start() {
    local workers="${1:-2}" client_port
    [[ "$workers" =~ ^[1-9][0-9]*$ ]] || fail "workers: a number from 1 on, got '$workers'"
    (umask 077 && mkdir -p "$folder")
    [[ -O "$folder" ]] || fail "$folder is another user's: set CLUSTER_DIR to a short path of your own"
    if [[ -n "$(processes)" ]]; then
        check_head
        echo "it runs already; \`$0 stop\` ends it"
        [[ ! -e "$folder/env" ]] || cat "$folder/env"
        return
    fi
    port="$(choose_port RAY_PORT 6379)"
    dashboard="http://127.0.0.1:$(choose_port DASHBOARD_PORT 8265)"
    client_port="$(choose_port RAY_CLIENT_PORT 10001)"
    AUTOSCALER_METRIC_PORT="$(choose_port AUTOSCALER_METRIC_PORT 44217)"
    DASHBOARD_METRIC_PORT="$(choose_port DASHBOARD_METRIC_PORT 44227)"
    export AUTOSCALER_METRIC_PORT DASHBOARD_METRIC_PORT # Ray reads them
    make_token
    echo "$port ${dashboard##*:}" > "$folder/ports"
    echo "starting a head and $workers nodes with ${CPUS_PER_NODE:-2} CPUs each"
    if [[ -n "${REDIS:-}" ]]; then # in a namespace of its own: an older cluster in this Redis would come back
        RAY_REDIS_ADDRESS="$REDIS"
        RAY_external_storage_namespace="$(date +%s%N)"
        export RAY_REDIS_ADDRESS RAY_external_storage_namespace
    fi
    start_node --head --num-cpus=0 --port="$port" --temp-dir="$folder/ray" \
        --dashboard-host=127.0.0.1 --dashboard-port="${dashboard##*:}" \
        --include-dashboard=true --ray-client-server-port="$client_port"
    if [[ -n "${REDIS:-}" ]]; then
        unset RAY_REDIS_ADDRESS RAY_external_storage_namespace
        MOE_FRONTIER_LOCAL_CLUSTER="$folder" setsid "$0" keep "$port" > "$folder/control.log" 2>&1 < /dev/null &
    fi
    # A folder for each: nodes that share one unpack a job's code in the same place, and remove it under the job
    for ((node = 1; node <= workers; node++)); do
        start_node --address="127.0.0.1:$port" --num-cpus="${CPUS_PER_NODE:-2}" --temp-dir="$folder/$node"
    done
    echo "waiting for the nodes and a first job, up to ${READY_S:-180} s"
    wait_until_ready $((workers + 1)) || {
        tail -n 5 "$folder"/ray/session_latest/logs/dashboard{,_agent}.log "$folder/ready.log" >&2 || true
        stop
        fail "the cluster did not come up"
    }
    how_to_use
}

stop() {
    local left
    [[ -n "$(processes)" ]] || { echo "nothing of $folder runs"; return; }
    left="$(processes end)"
    [[ -z "$left" ]] || fail "still running: $left"
    rm -f "$folder/env"
    echo "stopped; logs stay in $folder"
}

case "${1:-}" in
start) start "${2:-}" ;;
stop) stop ;;
keep) keep_control_server "$2" ;; # in the background of `start`
status)
    [[ -n "$(processes)" ]] || fail "nothing of $folder runs: \`$0 start\` starts it"
    check_head
    read -r port _ < "$folder/ports"
    exec "$bin/ray" status --address="127.0.0.1:$port"
    ;;
*) fail "usage: $0 start [workers] | stop | status" ;;
esac

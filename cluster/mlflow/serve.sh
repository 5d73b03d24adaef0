#!/usr/bin/env bash
# MLflow's server for a team: runs in a database, files in an object store, nothing without a password.
#
#   cluster/mlflow/serve.sh            serves, on http://127.0.0.1:5000 unless told otherwise
#   cluster/mlflow/serve.sh upgrade    brings the tables to the installed version of MLflow, and ends
#
# Needs in the environment, or in the files that <NAME>_FILE names:
#   MLFLOW_BACKEND_STORE_URI         postgresql://user:password@host:5432/database (%-encoded where need be)
#   MLFLOW_ARTIFACTS_DESTINATION     s3://bucket/prefix; credentials as boto3 finds them (AWS_..., a role)
#   MLFLOW_AUTH_ADMIN_PASSWORD       of the first user, who makes the others; read when there is none yet
#   MLFLOW_FLASK_SERVER_SECRET_KEY   any long random text, the same at every start
# Takes: MLFLOW_AUTH_ADMIN_USERNAME (admin), MLFLOW_AUTH_DATABASE_URI (the database above), MLFLOW_HOST
# (127.0.0.1), MLFLOW_PORT (5000), MLFLOW_WORKERS (2), MLFLOW_SERVER_ALLOWED_HOSTS, MLFLOW_DEFAULT_PERMISSION
# (READ), MLFLOW_S3_ENDPOINT_URL, and whatever else MLflow itself reads. docs/tracking.md tells more.
set -euo pipefail
umask 077

fail() {
    echo "error: $1" >&2
    exit 1
}

need() {
    local name=$1 file="${1}_FILE"
    if [[ -z ${!name:-} && -n ${!file:-} ]]; then
        [[ -r ${!file} ]] || fail "$file=${!file} cannot be read"
        export "$name=$(<"${!file}")"
    fi
    [[ -n ${!name:-} ]] || fail "$name is not set: $2 (or set $file to a file with it)"
}

need MLFLOW_BACKEND_STORE_URI "the database, postgresql://user:password@host:5432/database"

case ${1:-serve} in
serve) ;;
upgrade) # not `mlflow db upgrade URI`, for everybody on this machine may read the arguments of a command
    exec python -c '
import os
from mlflow.cli import cli
cli(["db", "upgrade", os.environ["MLFLOW_BACKEND_STORE_URI"]])'
    ;;
*) fail "unknown command $1: serve or upgrade" ;;
esac

need MLFLOW_ARTIFACTS_DESTINATION "where files go, s3://bucket/prefix"
need MLFLOW_AUTH_ADMIN_PASSWORD "12 characters or more for the first user"
need MLFLOW_FLASK_SERVER_SECRET_KEY "a long random text, for instance of: openssl rand -hex 32"
((${#MLFLOW_AUTH_ADMIN_PASSWORD} >= 12)) || fail "MLFLOW_AUTH_ADMIN_PASSWORD is shorter than 12 characters"
((${#MLFLOW_FLASK_SERVER_SECRET_KEY} >= 16)) ||
    fail "MLFLOW_FLASK_SERVER_SECRET_KEY is shorter than 16 characters: take that of openssl rand -hex 32"

host=${MLFLOW_HOST:-127.0.0.1}
case $host in
127.* | localhost | ::1) ;;
*) [[ -n ${MLFLOW_SERVER_ALLOWED_HOSTS:-} ]] ||
    fail "MLFLOW_HOST=$host is open to others: set MLFLOW_SERVER_ALLOWED_HOSTS to the names they call it by" ;;
esac
python -c 'import flask_wtf' 2>/dev/null || fail "a package for users is missing: pip install 'mlflow[auth]'"

# A password is slow to check by design, .15 s and more of every request: once a minute is enough. A password
# that changes, or a user who is deleted, may be good for that minute in the other processes.
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
users=${MLFLOW_AUTH_DATABASE_URI:-$MLFLOW_BACKEND_STORE_URI}
cat >"$folder/auth.ini" <<INI
[mlflow]
default_permission = ${MLFLOW_DEFAULT_PERMISSION:-READ}
database_uri = ${users//%/%%}
authorization_function = mlflow.server.auth:authenticate_request_basic_auth
auth_cache_ttl_seconds = 60
INI

export MLFLOW_AUTH_CONFIG_PATH=$folder/auth.ini
export MLFLOW_AUTH_ADMIN_USERNAME=${MLFLOW_AUTH_ADMIN_USERNAME:-admin}
export MLFLOW_DISABLE_TELEMETRY=${MLFLOW_DISABLE_TELEMETRY:-true}
export MLFLOW_SERVER_ENABLE_JOB_EXECUTION=${MLFLOW_SERVER_ENABLE_JOB_EXECUTION:-false} # jobs of its LLM pages

python -m mlflow server --app-name basic-auth --serve-artifacts \
    --host "$host" --port "${MLFLOW_PORT:-5000}" --workers "${MLFLOW_WORKERS:-2}" &
server=$!
trap 'kill -TERM "$server" 2>/dev/null || true' TERM INT HUP
status=0
while kill -0 "$server" 2>/dev/null; do # a signal ends `wait` before the server
    status=0
    wait "$server" || status=$?
done
exit "$status"

#!/usr/bin/env bash
# Waits for the cloud's notice that it takes this spot machine back, and has Ray drain the node: a training
# that runs on it saves and leaves before the machine is gone. Ray's launcher does not watch for that itself.
#
#   drain_on_notice.sh aws|gcp [more flags of `ray drain-node`]
#
# Started on worker nodes by cluster/aws.yaml and cluster/gcp.yaml; ends after the one notice. On machines that
# are not spot there is never one. METADATA_URL and POLL_S are for its test.
set -euo pipefail

metadata="${METADATA_URL:-http://169.254.169.254}"
ask() { curl --noproxy '*' --fail --silent --max-time 5 "$@"; }

# Prints how many seconds are left; fails while there is no notice.
seconds_left_aws() {
    local token notice
    token="$(ask --request PUT --header 'X-aws-ec2-metadata-token-ttl-seconds: 60' \
        "$metadata/latest/api/token")" || return
    notice="$(ask --header "X-aws-ec2-metadata-token: $token" \
        "$metadata/latest/meta-data/spot/instance-action")" || return
    [[ "$notice" =~ \"time\":\ *\"([^\"]+)\" ]] || return
    echo $(($(date --date "${BASH_REMATCH[1]}" +%s) - $(date +%s)))
}

seconds_left_gcp() {
    local preempted="$metadata/computeMetadata/v1/instance/preempted"
    [[ "$(ask --header 'Metadata-Flavor: Google' "$preempted")" == TRUE ]] || return
    echo 30 # always: the value only says that it has begun
}

cloud="${1:-}"
if [[ "$cloud" != aws && "$cloud" != gcp ]]; then
    echo "usage: $0 aws|gcp [flags of ray drain-node]" >&2
    exit 2
fi
shift

until left="$(seconds_left_"$cloud")"; do
    sleep "${POLL_S:-2}"
done
echo "$(date --utc +%FT%TZ) this machine goes in $left s: draining"
ray drain-node --reason DRAIN_NODE_REASON_PREEMPTION --reason-message "$cloud takes the spot machine back" \
    --deadline-remaining-seconds "$((left > 1 ? left : 1))" "$@"

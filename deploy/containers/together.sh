# shellcheck shell=bash
# Services that live and end together, where no systemd keeps them. Sourced, not run: `begin COMMAND...` for each, then
# `together`. When one of them ends, or SIGTERM comes, the others are asked to end, those that began last first.

begun=()
asked=0
trap 'asked=1' TERM INT

begin() {
    ((asked == 0)) || together
    "$@" &
    begun=("$!" "${begun[@]}")
}

# Ends with 0 when it was asked to end, else with the status of whoever ended first, and at least 1.
together() {
    local status=0 first='' pid
    while [[ $asked == 0 && -z $first ]]; do # not `wait -n`: it may miss who ended before it was asked
        for pid in "${begun[@]}"; do kill -0 "$pid" 2>/dev/null || first=$pid; done
        [[ -n $first ]] || sleep 0.5
    done
    [[ -z $first ]] || wait "$first" || status=$?
    for pid in "${begun[@]}"; do
        kill -TERM "$pid" 2>/dev/null || true
        while kill -0 "$pid" 2>/dev/null; do wait "$pid" 2>/dev/null || true; done
    done
    ((asked == 0)) || exit 0
    exit $((status == 0 ? 1 : status))
}

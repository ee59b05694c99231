#!/usr/bin/env bash
# Join this machine to a Ray cluster, or begin one: then `python examples/ray_serve.py` spreads its replicas over all.
# Usage: examples/cluster.sh head              on the first machine; prints what the others are to be told
#        examples/cluster.sh join HEAD:PORT    on every other machine
#        examples/cluster.sh leave             on a machine that is to go
# Every machine needs a clone of this repository, and the model under the same path or name.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export RAY_USAGE_STATS_ENABLED=0  # Ray would report to its makers otherwise
export RAY_AUTH_MODE=token  # otherwise anybody on the network could run programs on the cluster
port=6379
[ "${1:-}" != join ] || : "${2:?say which: examples/cluster.sh join HEAD:PORT}"  # before anything is installed

case "${1:-}" in
  head | join)
    make --silent setup
    .venv/bin/python tools/setup_env.py --extras ray
    ;;&
  head)
    .venv/bin/ray get-auth-token --generate >/dev/null  # into ~/.ray/auth_token, where there is none
    .venv/bin/ray start --head --port "$port" --include-dashboard false --disable-usage-stats
    address=$(hostname -I 2>/dev/null | cut -d ' ' -f 1)
    echo "Copy ~/.ray/auth_token to the other machines. Then, there: examples/cluster.sh join ${address:-THIS_MACHINE}:$port"
    ;;
  join) .venv/bin/ray start --address "$2" --disable-usage-stats ;;
  leave) .venv/bin/ray stop ;;
  *)
    sed -n '2,5s/^# //p' "$0" >&2
    exit 2
    ;;
esac

#!/usr/bin/env bash
# Build the wheel of rotor with each Python that is at hand, and solve a chain with the core that it
# holds, without torch: what cibuildwheel does for releases, for this machine alone.
#
#   ci/core_wheels.sh python3.11 python3.13
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

tried=0
for python in "$@"; do
    if ! "$python" -c "" 2>/dev/null; then
        echo "core: no $python here"
        continue
    fi
    rm -rf rotor/build # what another interpreter has built would go into the wheel
    env=$work/$tried
    "$python" -m venv "$env"
    "$env/bin/python" -m pip wheel -q --no-deps -w "$env/wheel" ./rotor
    "$env/bin/python" -m pip install -q --no-deps "$env"/wheel/*.whl
    echo "core: $(basename "$env"/wheel/*.whl)"
    (cd "$work" && "$env/bin/python" "$OLDPWD/rotor/tests/core_alone.py")
    tried=$((tried + 1))
done
[ "$tried" -gt 0 ] || { echo "core: none of $* is here" >&2 && exit 1; }

#!/usr/bin/env bash
# Install one package from its wheel, with only what it declares, into a fresh environment, and run
# its tests there. What works here works for a user who installs just that package. What follows the
# name goes to pytest.
#
#   ci/isolated_install.sh ./rkgb -m "not slow and not nightly"
set -euo pipefail
cd "$(dirname "$0")/.."
package=$(basename "$1")
case $package in
    rkgb | rotor | rockmate) ;;
    *) echo "usage: $0 rkgb|rotor|rockmate [options of pytest]" >&2 && exit 2 ;;
esac
shift
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$python" -m venv "$work/venv"
rm -rf ./*/build  # left-overs of earlier builds would go into the wheels
"$work/venv/bin/python" -m pip wheel -q --no-deps -w "$work/wheels" ./rkgb ./rotor ./rockmate
wheel=$(find "$work/wheels" -name "${package/rotor/rk_rotor}-*.whl")
"$work/venv/bin/python" -m pip install -q -c constraints.txt --find-links "$work/wheels" "$wheel[test]"
"$work/venv/bin/python" -m pip check
# A copy of the tests and of what they read: the checkout's sources must not be importable.
mkdir "$work/$package"
for part in tests README.md pictures; do
    if [ -e "$package/$part" ]; then cp -r "$package/$part" "$work/$package/"; fi
done
cp -r pyproject.toml conftest.py test_support "$work/"
cd "$work"
"$work/venv/bin/python" -P -m pytest "$package/tests" "$@"

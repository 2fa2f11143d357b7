#!/usr/bin/env bash
# Installs into .venv on first use, then runs the quick tests: bash launch/test.sh [--slow] [--newest] [arguments of pytest]
#   --newest   installs the newest releases of all packages instead of those that .ci/newest.txt names
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/setup.sh
source launch/setup.sh
constraints=.ci/newest.txt
for argument; do
  shift
  if [[ $argument == --newest ]]; then constraints=""; else set -- "$@" "$argument"; fi
done
prepare_venv ".[test]" .venv "$constraints"
exec .venv/bin/python -m pytest --complete "$@"

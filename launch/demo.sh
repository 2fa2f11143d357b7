#!/usr/bin/env bash
# Installs into .venv on first use, then runs the demo: bash launch/demo.sh [--config=...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/setup.sh
source launch/setup.sh
prepare_venv .
root="$PWD"
cd "$OLDPWD" # paths in arguments are of this folder
exec "$root/.venv/bin/python" "$root/launch/demo.py" "$@"

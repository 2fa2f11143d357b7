#!/usr/bin/env bash
# Installs into .venv on first use, then runs the demo: bash launch/demo.sh [--config=...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/setup.sh
source launch/setup.sh
prepare_venv .
exec .venv/bin/python launch/demo.py "$@"

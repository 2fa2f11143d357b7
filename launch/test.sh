#!/usr/bin/env bash
# Installs into .venv on first use, then runs the quick tests: bash launch/test.sh [--slow] [arguments of pytest]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/setup.sh
source launch/setup.sh
prepare_venv ".[test]"
exec .venv/bin/python -m pytest --complete "$@"

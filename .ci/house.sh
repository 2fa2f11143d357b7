#!/usr/bin/env bash
# Checks the layout of the code and the sizes that readers notice; run it in an environment of the tests (`.ci/run`
# does). Ruff is used where it is installed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if command -v ruff >/dev/null; then
  ruff check .
  ruff format --check .
fi
PYTHONPATH=.:tests "${PYTHON:-python3}" .ci/house.py

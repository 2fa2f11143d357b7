# shellcheck shell=bash
# Sourced by demo.sh and test.sh, from the root of the repository: a virtual environment in .venv.

# Prints a Python from 3.11 on that really runs: a version manager's stand-in may exist and fail.
find_python() {
  local candidate
  for candidate in python3.12 python3.11 python3.13 python3.14 python3; do
    if "$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
      echo "$candidate"
      return
    fi
  done
  echo "No Python found that can make a virtual environment: install Python 3.11 or 3.12 with its venv module." >&2
  return 1
}

# prepare_venv WHAT, "." or ".[test]": makes .venv where it is missing or broken, and installs this package into
# it where setup.py, WHAT or the folder changed. A stamp says what was installed; only a success leaves one.
prepare_venv() {
  local what="$1" python wanted stamp=.venv/installed
  if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    python="$(find_python)"
    echo "Making .venv with $("$python" --version)." >&2
    "$python" -m venv --clear .venv
  fi
  wanted="$(cksum <setup.py) in $PWD:"
  if ! grep -qxF "$wanted $what" "$stamp" 2>/dev/null; then
    echo "Installing $what into .venv; this is done once." >&2
    .venv/bin/python -m pip install -qq --disable-pip-version-check --editable "$what" # errors still show
    printf '%s .\n%s %s\n' "$wanted" "$wanted" "$what" >"$stamp"
  fi
}

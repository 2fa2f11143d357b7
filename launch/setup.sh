# shellcheck shell=bash
# Sourced by demo.sh, test.sh, .ci/run and the workers of a TPU slice, from the root of the repository.

# A release of Python that can make a virtual environment, and for which all dependencies have wheels.
readonly USABLE='
import ensurepip, sys, sysconfig, venv
known = (3, 11) <= sys.version_info < (3, 15) and sys.version_info.releaselevel == "final"
sys.exit(not known or bool(sysconfig.get_config_var("Py_GIL_DISABLED")))'

# Prints the newest usable Python, or the first usable one of the versions in PYTHONS. A version manager's stand-in on PATH
# may exist and fail, so what the managers have installed is looked at, too.
find_python() {
  local version candidate
  for version in ${PYTHONS:-3.14 3.13 3.12 3.11 3}; do
    for candidate in "python$version" \
      "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python \
      "${ASDF_DATA_DIR:-$HOME/.asdf}/installs/python/$version".*/bin/python \
      "${MISE_DATA_DIR:-$HOME/.local/share/mise}/installs/python/$version".*/bin/python \
      "${UV_PYTHON_INSTALL_DIR:-$HOME/.local/share/uv/python}/cpython-$version".*/bin/python; do
      if "$candidate" -c "$USABLE" >/dev/null 2>&1; then
        echo "$candidate"
        return
      fi
    done
  done
  echo "No Python ${PYTHONS:-3.11 to 3.14} found that can make a virtual environment: install it with its venv module." >&2
  return 1
}

# prepare_venv WHAT [VENV [CONSTRAINTS]]: makes VENV (.venv) where it is missing or broken, and installs WHAT, "." or
# ".[test]", where setup.py, the constraints, WHAT or the folder changed. A stamp says what was installed; only a success
# leaves one. If CONSTRAINTS is empty, every call installs the newest releases.
prepare_venv() {
  local what="$1" venv="${2:-.venv}" constraints="${3-.ci/newest.txt}" python wanted stamp pip
  stamp="$venv/installed"
  pip=("$venv/bin/python" -m pip --disable-pip-version-check)
  if ! "${pip[@]}" --version >/dev/null 2>&1; then
    python="$(find_python)"
    echo "Making $venv with $("$python" --version)." >&2
    "$python" -m venv --clear "$venv"
  fi
  pip+=(install -qq --editable "$what") # errors still show
  if [[ -z $constraints ]]; then
    echo "Installing the newest releases for $what into $venv." >&2
    rm -f "$stamp"
    "${pip[@]}" --upgrade --upgrade-strategy=eager
    return
  fi
  wanted="$(cat setup.py "$constraints" | cksum) in $PWD:"
  if ! grep -qxF "$wanted $what" "$stamp" 2>/dev/null; then
    echo "Installing $what into $venv; this is done once." >&2
    # An older pip applies the first variable to the tools that build the package, too; a newer one, the second.
    PIP_CONSTRAINT="$constraints" PIP_BUILD_CONSTRAINT="$constraints" "${pip[@]}"
    printf '%s .\n%s %s\n' "$wanted" "$wanted" "$what" >"$stamp"
  fi
}

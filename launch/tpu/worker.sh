#!/usr/bin/env bash
# Does the work on one worker. setup.sh and run.sh call it there.
#
#   worker.sh install COMMIT         replaces the previous checkout by this one and installs it
#   worker.sh start JOB COMMAND...   starts the command in the background, so that a lost connection does not end it
#   worker.sh follow JOB             prints the log until the command ends; exit status 75 if there is no such job
#   worker.sh finish JOB             waits for the end, stops a hanging command, prints "HOST ended with STATUS"
#   worker.sh last JOB               prints the end of the log
#   worker.sh stop JOB               ends the command
#
# JOB names one call of run.sh; "current" is the job that runs, or ran last. All actions but install may be called twice.
# The exit status is never 255, which gcloud takes for a failure of ssh.
set -euo pipefail

CODE="$HOME/specsamp"                    # the checkout
JOB="$HOME/specsamp_job"                 # the current job: name, command, pid, boot, log, and status after its end
SECRETS="$HOME/specsamp_secrets"         # with .JOB: what run.sh --secret_env sends, removed when the command starts
PATIENCE="${SPECSAMP_TPU_PATIENCE:-300}" # seconds to wait for this worker to end after worker 0 has ended
GRACE="${SPECSAMP_TPU_GRACE:-10}"        # seconds between asking a command to end and killing it
readonly GONE=75
# shellcheck source=launch/tpu/secrets.sh
source "$(dirname "${BASH_SOURCE[0]}")/secrets.sh"

fail() {
  echo "$(host): $1" >&2
  exit "${2:-1}"
}

# Prints "w-3" on worker 3 of a slice.
host() { hostname | sed 's/.*-\(w-[0-9]*\)$/\1/'; }

is_current() { [[ -d $JOB && ($1 == current || $1 == "$(cat "$JOB/name")") ]]; }

boot() { cat /proc/sys/kernel/random/boot_id; }

# Whether a process of the current job exists and is no zombie. Process numbers start again when the machine restarts, so
# the boot must be the same.
alive() {
  [[ -e $JOB/pid && $(cat "$JOB/boot") == "$(boot)" ]] || return 1
  ps -o stat= --sid "$(cat "$JOB/pid")" | awk '!/^Z/ { alive = 1 } END { exit !alive }'
}

# Whether the current job is running; processes that its command left behind do not count.
runs() { [[ ! -e $JOB/status ]] && alive; }

install() {
  local kept
  ! runs || fail "a command is running: $(cat "$JOB/command"); end it with launch/tpu/run.sh --stop"
  rm -f "$CODE/COMMIT" # until the installation has succeeded, no command can start
  mkdir -p "$CODE.kept" # setup.sh, called again after an interruption, removes $CODE.new
  for kept in .venv runs; do
    [[ ! -e $CODE/$kept ]] || mv "$CODE/$kept" "$CODE.kept/"
  done
  rm -rf "$CODE"
  mv "$CODE.new" "$CODE"
  for kept in .venv runs; do
    [[ ! -e $CODE.kept/$kept ]] || mv "$CODE.kept/$kept" "$CODE/"
  done
  rmdir "$CODE.kept"
  cd "$CODE"
  # shellcheck source=launch/setup.sh
  source launch/setup.sh
  if ! .venv/bin/python -m pip --version >/dev/null 2>&1 && ! find_python >/dev/null 2>&1; then
    echo "$(host): no Python 3.11 or newer found, fetching 3.12" >&2
    python3 -m pip install --quiet --upgrade --target="$HOME/.specsamp_uv" uv
    "$HOME/.specsamp_uv/bin/uv" venv --quiet --seed --python=3.12 .venv
  fi
  prepare_venv ".[tpu]"
  .venv/bin/python -c "import specsamp"
  echo "$1" >COMMIT
  echo "$(host): has $1"
}

start() {
  local job="$1"
  shift
  ! is_current "$job" || exit 0 # gcloud connected a second time
  ! runs || fail "a command is running: $(cat "$JOB/command"); end it with launch/tpu/run.sh --stop"
  [[ -e $CODE/COMMIT ]] || fail "the installation is missing or incomplete: call launch/tpu/setup.sh"
  if [[ -e $SECRETS.$job ]]; then
    # shellcheck source=/dev/null
    source "$SECRETS.$job"
  fi
  rm -rf "$JOB"
  mkdir "$JOB"
  echo "$job" >"$JOB/name"
  rm -f "$SECRETS".* # also those of calls that failed
  hide "$@"
  printf '%q ' "${hidden[@]}" >"$JOB/command"
  boot >"$JOB/boot"
  cd "$CODE"
  SPECSAMP_VERSION="$(cat COMMIT)"
  export SPECSAMP_VERSION PATH="$CODE/.venv/bin:$PATH" PYTHONUNBUFFERED=1
  setsid nohup bash "$CODE/launch/tpu/worker.sh" supervise "$@" </dev/null >"$JOB/log" 2>&1 &
  echo $! >"$JOB/pid"
}

# Runs the command and notes its exit status.
supervise() {
  local status=0
  "$@" || status=$?
  echo "$status" >"$JOB/status.new"
  mv "$JOB/status.new" "$JOB/status"
}

follow() {
  is_current "$1" || exit "$GONE"
  if runs; then
    tail -n 1000 -F --sleep-interval=0.2 --pid="$(cat "$JOB/pid")" "$JOB/log"
  else
    tail -n 1000 "$JOB/log"
  fi
}

stop() {
  local signal tries
  [[ $1 == current ]] || rm -f "$SECRETS.$1"
  is_current "$1" && runs || return 0
  echo 143 >"$JOB/status"
  for signal in TERM KILL; do
    pkill "-$signal" --session "$(cat "$JOB/pid")" || true
    for ((tries = 0; tries < 10 * GRACE; tries++)); do
      alive || return 0
      sleep 0.1
    done
  done
}

finish() {
  local until=$((SECONDS + PATIENCE)) status="$GONE" # of a worker that was restarted
  if is_current "$1"; then
    while runs && ((SECONDS < until)); do sleep 0.2; done
    stop "$1"
    [[ ! -e $JOB/status ]] || status="$(cat "$JOB/status")"
  fi
  echo "$(host) ended with $status"
}

last() { ! is_current "$1" || tail -n 20 "$JOB/log" | sed "s/^/$(host)| /"; }

case "${1:-}" in
  install | start | supervise | follow | finish | last | stop) "$@" ;;
  *) fail "unknown action '${1:-}'" 2 ;;
esac

#!/usr/bin/env bash
# Runs a command on all workers of a slice, shows the output of worker 0, and ends with the command's exit status.
#
#   launch/tpu/run.sh --name=pod -- python launch/benchmark.py --config=configs/chinchilla.py --distributed --output=gs://bucket/results/v4-32.json
#   launch/tpu/run.sh --name=pod --attach    see again what runs, after a dropped connection or ctrl-C
#   launch/tpu/run.sh --name=pod --stop      end it
#
#   --name, --zone, --project   of the slice, as for create.sh
#   --dry_run   print the commands, and run nothing
#
# The command runs in the checkout that setup.sh made, with its virtual environment, and goes on without this
# terminal. One at a time: it has the chips to itself. Where it fails, the last lines of every worker are shown; where
# the slice was taken away or restarted the exit status is 75.
set -euo pipefail
# shellcheck source=launch/tpu/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
parse_flags "name= zone= project= attach stop" "$@"
require name zone project
need_gcloud
worker="bash specsamp/launch/tpu/worker.sh"
job=current

if [[ $stop == true ]]; then
  on_workers all "$worker stop $job"
  exit
fi
if [[ $attach == false ]]; then
  require_command
  job="$(date -u +%Y%m%d-%H%M%S)-$$"
  if ! on_workers all "$worker start $job $(quoted "${command[@]}")"; then
    on_workers all "$worker stop $job" || true # nobody waits for workers that are not coming
    die "not all workers could start it: see above" 1
  fi
fi
if [[ $dry_run == true ]]; then
  on_workers 0 "$worker follow $job"
  on_workers all "$worker finish $job"
  note "where it failed:"
  on_workers all "$worker last $job"
  exit
fi

trap 'say "The command goes on. See it: launch/tpu/run.sh --name=$name --attach; end it: --stop"; exit 130' INT
lost() { die "$name is $state: $1" "$GONE"; }
for ((tries = 0; ; tries++)); do
  followed=0
  on_workers 0 "$worker follow $job" || followed=$?
  ((followed)) || break
  read_state
  ((followed != GONE)) || lost "worker 0 knows nothing of this command, as after a restart"
  [[ $state == ACTIVE || $state == UNKNOWN ]] || lost "launch/tpu/keep_running.sh orders it again by itself"
  ((tries < 10)) || lost "but worker 0 does not answer"
  say "The connection is lost, the command goes on; connecting again."
  sleep "$POLL_SECONDS"
done

if ! ended="$(on_workers all "$worker finish $job")"; then
  read_state
  lost "not all workers answer"
fi
status=0
while read -r host verb _ code; do
  [[ $verb == ended && $code != 0 ]] || continue
  say "$host ended with $code"
  # A worker that was lost makes the others fail: its status is the one to report.
  [[ $status != 0 && $code != "$GONE" ]] || status="$code"
done <<<"$ended"
[[ $status == 0 ]] || on_workers all "$worker last $job" >&2 || true
exit "$status"

#!/usr/bin/env bash
# Sees a command through on a slice that may be taken away: orders the slice, sets it up and runs the command; when
# Google takes the slice, does all of that again, until the command has succeeded.
#
#   launch/tpu/keep_running.sh --name=pod --accelerator=v4-32 --spot -- python launch/train.py --config=... --distributed --workdir=gs://bucket/run
#
#   --name, --accelerator, --zone, --project, --spot, --reserved   as for create.sh
#   --ref               as for setup.sh; later rounds get the same commit as the first
#   --max_restarts      default 100
#   --delete_when_done  delete the slice once the command has ended, well or not
#   --dry_run           print the commands of one round, and run nothing
#
# The programs go on where they were if their --workdir outlives the slice: give them a gs:// path. A command that fails
# on a slice that is still there is not run again; its exit status is that of this script.
set -euo pipefail
# shellcheck source=launch/tpu/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
parse_flags "name= accelerator= zone= project= spot reserved ref= max_restarts= delete_when_done" "$@"
require name accelerator zone project
require_command
[[ $max_restarts =~ ^[0-9]+$ ]] || die "--max_restarts must be a number; got '$max_restarts'"
read_slice
read_commit
here="$ROOT/launch/tpu"
slice=("--name=$name" "${at[@]}" "--dry_run=$dry_run")
order=("--accelerator=$accelerator" "--spot=$spot" "--reserved=$reserved")

round() {
  "$here/create.sh" "${slice[@]}" "${order[@]}" && created=true &&
    "$here/setup.sh" "${slice[@]}" "--ref=$commit" &&
    "$here/run.sh" "${slice[@]}" -- "${command[@]}"
}

# Google refuses for a while to delete what it is taking away.
delete_slice() {
  local tries
  for ((tries = 1; tries <= 10; tries++)); do
    ! "$here/delete.sh" "${slice[@]}" || return 0
    sleep "$POLL_SECONDS"
  done
  die "$name cannot be deleted, and may cost money: see above" 1
}

done_with() {
  if [[ $delete_when_done == true ]]; then
    delete_slice
  else
    note "$name is still there and costs money until launch/tpu/delete.sh --name=$name"
  fi
  exit "$1"
}

if [[ $dry_run == true ]]; then
  round
  note "when the slice was taken away, and then the same again:"
  delete_slice
  exit
fi

# Sets state. A slice that is being taken away may say ACTIVE a little longer.
read_lasting_state() {
  local tries
  for ((tries = 0; tries < 4; tries++)); do
    read_state
    [[ $state == ACTIVE || $state == UNKNOWN ]] || break
    sleep "$POLL_SECONDS"
  done
}

lost_early=0 # in a row, before they could be used
for ((restarts = 0; restarts <= max_restarts; restarts++)); do
  created=false status=0
  round || status=$?
  case "$status" in
    0) done_with 0 ;;
    130) exit 130 ;; # ctrl-C: the scripts said what goes on
  esac
  if [[ $created == true ]]; then
    lost_early=0
  else
    [[ $status == "$GONE" ]] || die "the slice cannot be ordered: see above" "$status"
    (((lost_early += 1) < 3)) || die "the slice was lost $lost_early times before it was there: see above" "$status"
  fi
  read_lasting_state
  case "$state" in
    SUSPENDING | SUSPENDED | FAILED)
      say "$name is $state: ordering it again"
      delete_slice
      ;;
    MISSING | DELETING) die "somebody deleted $name: it is not ordered again" 1 ;;
    *)
      if [[ $status != "$GONE" ]]; then
        say "The command failed with $status, on a slice that is still there."
        done_with "$status"
      fi
      say "$name was restarted: setting it up again"
      ;;
  esac
done
die "$name was lost $restarts times: add --max_restarts to go on" "$GONE"

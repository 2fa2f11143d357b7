#!/usr/bin/env bash
# Runs a command to its end on a slice that Google may take away: orders the slice, sets it up and runs the command. If
# the slice is taken away, it does all of that again until the command has succeeded.
#
#   launch/tpu/keep_running.sh --name=pod --accelerator=v4-32 --spot -- python launch/train.py --config=... --distributed --workdir=gs://bucket/run
#
#   --name, --accelerator, --zone, --project, --spot, --reserved, --internal_ips, --network, --subnetwork,
#   --service_account   as for create.sh
#   --ref               as for setup.sh; later rounds use the same commit as the first
#   --secret_env, --tunnel_through_iap   as for run.sh; with --internal_ips alone, connections use internal addresses
#   --max_restarts      how often a lost slice is ordered again; default 100
#   --delete_when_done  delete the slice when the command has ended, also if it failed
#   --dry_run           print the commands of one round and run nothing
#
# A program continues where it was if its --workdir outlives the slice, so give it a gs:// path. A command that fails
# on a slice that still exists is not run again; this script ends with its exit status.
set -euo pipefail
# shellcheck source=launch/tpu/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
parse_flags "name= accelerator= zone= project= spot reserved internal_ips network= subnetwork= service_account= \
tunnel_through_iap secret_env= ref= max_restarts= delete_when_done --" "$@"
require name accelerator zone project
require_command
read_secrets
require_max_restarts
read_slice
read_commit
here="$ROOT/launch/tpu"
slice=("--name=$name" "${at[@]}" "--dry_run=$dry_run")
order=("--accelerator=$accelerator" "--spot=$spot" "--reserved=$reserved" "--internal_ips=$internal_ips")
[[ -z $network ]] || order+=("--network=$network")
[[ -z $subnetwork ]] || order+=("--subnetwork=$subnetwork")
[[ -z $service_account ]] || order+=("--service_account=$service_account")
connection=("--tunnel_through_iap=$tunnel_through_iap" "--internal_ips=$internal_ips")
secrets=()
[[ -z $secret_env ]] || secrets=("--secret_env=$secret_env")

round() {
  "$here/create.sh" "${slice[@]}" "${order[@]}" && created=true &&
    "$here/setup.sh" "${slice[@]}" "${connection[@]}" "--ref=$commit" &&
    "$here/run.sh" "${slice[@]}" "${connection[@]}" ${secrets[@]+"${secrets[@]}"} -- "${command[@]}"
}

# Deletes the slice. While Google takes a slice away, it refuses to delete it.
delete_slice() {
  local tries
  for ((tries = 1; tries <= 10; tries++)); do
    ! "$here/delete.sh" "${slice[@]}" || return 0
    sleep "$POLL_SECONDS"
  done
  die "$name cannot be deleted and may still cost money: see above" 1
}

done_with() {
  if [[ $delete_when_done == true ]]; then
    delete_slice
  else
    note "$name still exists and costs money until launch/tpu/delete.sh --name=$name"
  fi
  exit "$1"
}

if [[ $dry_run == true ]]; then
  round
  note "if the slice was taken away, this, and then all of the above again:"
  delete_slice
  exit
fi

# Sets state. A slice that is being taken away may be called ACTIVE for a little longer.
read_lasting_state() {
  local tries
  for ((tries = 0; tries < 4; tries++)); do
    read_state
    [[ $state == ACTIVE || $state == UNKNOWN ]] || break
    sleep "$POLL_SECONDS"
  done
}

lost_early=0 # slices in a row that were lost before they could be used
for ((restarts = 0; restarts <= max_restarts; restarts++)); do
  created=false status=0
  round || status=$?
  case "$status" in
    0) done_with 0 ;;
    130) exit 130 ;; # ctrl-C: the scripts have said what continues
  esac
  if [[ $created == true ]]; then
    lost_early=0
  else
    [[ $status == "$GONE" ]] || die "the slice cannot be ordered: see above" "$status"
    (((lost_early += 1) < 3)) || die "the slice was lost $lost_early times before it was ready: see above" "$status"
  fi
  read_lasting_state
  case "$state" in
    SUSPENDING | SUSPENDED | FAILED)
      say "$name is $state: ordering it again"
      delete_slice
      ;;
    MISSING | DELETING) die "somebody deleted $name, so it is not ordered again" 1 ;;
    *)
      if [[ $status != "$GONE" ]]; then
        say "The command failed with exit status $status on a slice that still exists."
        done_with "$status"
      fi
      say "$name was restarted: setting it up again"
      ;;
  esac
done
die "$name was lost $restarts times: raise --max_restarts to continue" "$GONE"

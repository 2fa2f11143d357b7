#!/usr/bin/env bash
# Orders a TPU slice as a queued resource, and waits until it is there.
#
#   launch/tpu/create.sh --name=pod --accelerator=v4-32 --zone=us-central2-b --project=my-project --spot
#
#   --name         names the slice: the queued resource and its one node
#   --accelerator  what to order, such as v4-32; what nobody sells is refused with the nearest names
#   --zone         default $CLOUDSDK_COMPUTE_ZONE, which gcloud reads as well
#   --project      default $CLOUDSDK_CORE_PROJECT, likewise
#   --spot         cheaper, and Google may take it away at any time: see keep_running.sh
#   --reserved     out of the project's reservation
#   --dry_run      print the commands, and run nothing
#
# Called again it goes on waiting; ctrl-C ends the waiting, not the order. The exit status is 75 where the slice
# was lost before it was there. You pay from ACTIVE until launch/tpu/delete.sh.
set -euo pipefail
# shellcheck source=launch/tpu/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
parse_flags "name= accelerator= zone= project= spot reserved" "$@"
require name accelerator zone project
[[ $spot == false || $reserved == false ]] || die "--spot and --reserved exclude each other"
read_slice
[[ $runtime_version != none ]] || die "$accelerator is not sold as a queued resource: use launch/tpu/gke.sh"
need_gcloud

note "$accelerator: $chips chips as $topology, $hosts host(s)"
order=(queued-resources create "$name" "--node-id=$name" "--accelerator-type=$accelerator" "--runtime-version=$runtime_version")
[[ $spot == false ]] || order+=(--spot)
[[ $reserved == false ]] || order+=(--reserved)
if [[ $dry_run == true ]]; then
  note "where there is no such queued resource yet:"
  show_read_state
  tpus "${order[@]}"
  note "every $POLL_SECONDS seconds, until it is ACTIVE:"
  show_read_state
  exit
fi

read_state
case "$state" in
  MISSING) tpus "${order[@]}" ;;
  UNKNOWN) die "Google Cloud gives no answer about $name: see above" 1 ;;
  *) say "$name is there already: $state" ;;
esac

trap 'say "$name stays in the queue: wait again with the same command, or launch/tpu/delete.sh --name=$name"; exit 130' INT
shown="" since=$SECONDS unanswered=0
while read_state && [[ $state != ACTIVE ]]; do
  case "$state" in
    FAILED | SUSPENDING | SUSPENDED | DELETING)
      reason="$(gcloud compute tpus queued-resources describe "$name" "${at[@]}" '--format=value(state.failedData.error.message)' 2>/dev/null)" || true
      say "$name is $state. ${reason:-Google gives no reason.}"
      die "launch/tpu/delete.sh --name=$name, then order again: in another zone, of another size, or with --spot" "$GONE"
      ;;
    # Just ordered, it may not be listed yet; and an answer may fail to come.
    MISSING | UNKNOWN) (((unanswered += 1) < 30)) || die "no news of $name after $unanswered questions" 1 ;;
    *) unanswered=0 ;;
  esac
  # A line for each change, and one every ten minutes.
  tick="$state $(((SECONDS - since) / 600))"
  [[ $tick == "$shown" ]] || say "$(date +%H:%M:%S) $name: $state, $(((SECONDS - since) / 60)) min"
  shown="$tick"
  sleep "$POLL_SECONDS"
done
say "$name is ACTIVE, and costs money until launch/tpu/delete.sh --name=$name. Next: launch/tpu/setup.sh --name=$name"

#!/usr/bin/env bash
# Orders a TPU slice as a queued resource and waits until it is ready.
#
#   launch/tpu/create.sh --name=pod --accelerator=v4-32 --zone=us-central2-b --project=my-project --spot
#
#   --name             name of the slice, for the queued resource and its only node
#   --accelerator      slice to order, such as v4-32; python3 specsamp/mesh/slices.py --list prints all names
#   --zone             zone that offers the slice; default $CLOUDSDK_COMPUTE_ZONE, which gcloud reads too
#   --project          project that pays for it; default $CLOUDSDK_CORE_PROJECT, which gcloud reads too
#   --spot             order at the lower price; Google may take the slice away at any time, see keep_running.sh
#   --reserved         take the slice from the project's reservation
#   --internal_ips     give the hosts no external addresses; give setup.sh, run.sh and fetch.sh this flag as well, or
#                      --tunnel_through_iap
#   --network          network of the hosts; default "default"
#   --subnetwork       subnetwork of the hosts
#   --service_account  service account that the hosts act as; default that of Compute Engine
#   --dry_run          print the commands and run nothing
#
# Called again it continues to wait. Ctrl-C ends the waiting, but not the order. The exit status is 75 if the slice was
# lost before it was ready. You pay from the state ACTIVE until launch/tpu/delete.sh.
set -euo pipefail
# shellcheck source=launch/tpu/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
parse_flags "name= accelerator= zone= project= spot reserved internal_ips network= subnetwork= service_account=" "$@"
require name accelerator zone project
[[ $spot == false || $reserved == false ]] || die "--spot and --reserved exclude each other: give one of them"
read_slice
[[ $runtime_version != none ]] || die "$accelerator is not sold as a queued resource: use launch/tpu/gke.sh"
need_gcloud

note "$accelerator: $chips chips as $topology, $hosts host(s)"
order=(queued-resources create "$name" "--node-id=$name" "--accelerator-type=$accelerator" "--runtime-version=$runtime_version")
[[ $spot == false ]] || order+=(--spot)
[[ $reserved == false ]] || order+=(--reserved)
[[ $internal_ips == false ]] || order+=(--internal-ips)
[[ -z $network ]] || order+=("--network=$network")
[[ -z $subnetwork ]] || order+=("--subnetwork=$subnetwork")
[[ -z $service_account ]] || order+=("--service-account=$service_account")
if [[ $dry_run == true ]]; then
  note "if there is no such queued resource yet:"
  show_read_state
  tpus "${order[@]}"
  note "every $POLL_SECONDS seconds until it is ACTIVE:"
  show_read_state
  exit
fi

read_state
case "$state" in
  MISSING) tpus "${order[@]}" ;;
  UNKNOWN) die "Google Cloud does not answer about $name: see above" 1 ;;
  *) say "$name exists already: $state" ;;
esac

trap 'say "$name stays in the queue: continue to wait with the same command, or cancel with launch/tpu/delete.sh --name=$name"; exit 130' INT
shown_state="" since=$SECONDS unanswered=0
while read_state && [[ $state != ACTIVE ]]; do
  case "$state" in
    FAILED | SUSPENDING | SUSPENDED | DELETING)
      reason="$(gcloud compute tpus queued-resources describe "$name" "${at[@]}" '--format=value(state.failedData.error.message)' 2>/dev/null)" || true
      say "$name is $state. ${reason:-Google Cloud gives no reason.}"
      die "launch/tpu/delete.sh --name=$name, then order again: in another zone, of another size, or with --spot" "$GONE"
      ;;
    # A new order may not be listed yet, and an answer may be lost.
    MISSING | UNKNOWN) (((unanswered += 1) < 30)) || die "Google Cloud did not answer $unanswered questions about $name" 1 ;;
    *) unanswered=0 ;;
  esac
  # One line for each change, and one every ten minutes.
  tick="$state $(((SECONDS - since) / 600))"
  [[ $tick == "$shown_state" ]] || say "$(date +%H:%M:%S) $name: $state, $(((SECONDS - since) / 60)) min"
  shown_state="$tick"
  sleep "$POLL_SECONDS"
done
say "$name is ACTIVE and costs money until launch/tpu/delete.sh --name=$name. Next: launch/tpu/setup.sh --name=$name"

#!/usr/bin/env bash
# Deletes a slice with all that is on it, and its queued resource: nothing of it costs money afterwards.
#
#   launch/tpu/delete.sh --name=pod
#
#   --name, --zone, --project   of the slice, as for create.sh
#   --dry_run   print the commands, and run nothing
#
# Buckets stay.
set -euo pipefail
# shellcheck source=launch/tpu/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
parse_flags "name= zone= project=" "$@"
require name zone project
need_gcloud

if [[ $dry_run == true ]]; then
  show_read_state
  tpus queued-resources delete "$name" --force --quiet
  note "where a node of this name is left, as when it was made by other means:"
  tpus tpu-vm describe "$name" '--format=value(state)'
  tpus tpu-vm delete "$name" --quiet
  exit
fi

read_state
case "$state" in
  MISSING) say "There is no queued resource $name." ;;
  *) tpus queued-resources delete "$name" --force --quiet ;;
esac
if node="$(gcloud compute tpus tpu-vm describe "$name" "${at[@]}" '--format=value(state)' 2>&1)"; then
  tpus tpu-vm delete "$name" --quiet
elif [[ $node != *NOT_FOUND* && $node != *"was not found"* ]]; then
  die "whether the node $name is gone is not known, and it may cost money: $node" 1
fi
say "$name is gone from $zone."

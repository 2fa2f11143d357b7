#!/usr/bin/env bash
# Deletes a slice, everything on it, and its queued resource. Nothing of it costs money afterwards.
#
#   launch/tpu/delete.sh --name=pod
#
#   --name, --zone, --project   the slice, as for create.sh
#   --dry_run                   print the commands and run nothing
#
# Buckets are kept.
set -euo pipefail
# shellcheck source=launch/tpu/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
parse_flags "name= zone= project=" "$@"
require name zone project
need_gcloud

if [[ $dry_run == true ]]; then
  show_read_state
  tpus queued-resources delete "$name" --force --quiet
  note "if there is still a node of this name, for example one that another tool created:"
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
  die "it is not known whether the node $name is gone; it may still cost money: $node" 1
fi
say "$name is deleted from $zone."

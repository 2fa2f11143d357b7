#!/usr/bin/env bash
# Copies results here: from a bucket, or from worker 0 of a slice.
#
#   launch/tpu/fetch.sh --from=gs://bucket/run --to=runs/pod
#   launch/tpu/fetch.sh --name=pod --from=runs/benchmark --to=runs/pod
#
#   --from      a folder: a gs:// path, or one of worker 0, where a relative path begins in the checkout
#   --to        a folder here; one of the same name comes into it
#   --name, --zone, --project   of the slice, where it is not a bucket
#   --dry_run   print the commands, and run nothing
#
# The output of the last command on worker 0 is in --from='~/specsamp_job'.
set -euo pipefail
# shellcheck source=launch/tpu/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
parse_flags "from= to= name= zone= project=" "$@"
require from to
need_gcloud

from="${from%/}"
if [[ $from == gs://* ]]; then
  run mkdir -p "$to/${from##*/}"
  run gcloud storage rsync --recursive "$from" "$to/${from##*/}"
else
  require name zone project
  run mkdir -p "$to"
  [[ $from == [/~]* ]] || from="specsamp/$from"
  tpus tpu-vm scp --recurse --worker=0 "$name:$from" "$to"
fi

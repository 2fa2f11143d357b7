#!/usr/bin/env bash
# Copies results here: from a bucket, or from worker 0 of a slice.
#
#   launch/tpu/fetch.sh --from=gs://bucket/run --to=runs/pod
#   launch/tpu/fetch.sh --name=pod --from=runs/benchmark --to=runs/pod
#
#   --from                      folder to copy: a gs:// path, or a path on worker 0, relative to its checkout
#   --to                        local folder that receives the copy, as a subfolder of the same name
#   --name, --zone, --project   the slice, as for create.sh, if the folder is not in a bucket
#   --tunnel_through_iap, --internal_ips   how to reach worker 0, as for run.sh
#   --dry_run                   print the commands and run nothing
#
# The log of the last command on worker 0 is in --from='~/specsamp_job'.
set -euo pipefail
# shellcheck source=launch/tpu/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
parse_flags "from= to= name= zone= project= tunnel_through_iap internal_ips" "$@"
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
  over_ssh scp --recurse --worker=0 "$name:$from" "$to"
fi

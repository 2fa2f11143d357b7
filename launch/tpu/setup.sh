#!/usr/bin/env bash
# Copies one commit of this repository to every worker of a slice and installs it there.
#
#   launch/tpu/setup.sh --name=pod
#
#   --name, --zone, --project   the slice, as for create.sh
#   --ref                       commit, branch or tag to copy; default HEAD, which then must hold all changes
#   --tunnel_through_iap, --internal_ips   how to reach the workers, as for run.sh
#   --dry_run                   print the commands and run nothing
#
# Each worker gets a virtual environment with jax[tpu], and Python 3.12 if it has no Python 3.11 or newer. A worker notes
# the commit after everything succeeded; without that note it refuses to run commands. Programs read the commit from
# SPECSAMP_VERSION. Call the script again after each commit: packages are installed only once.
#
# For several workers gcloud needs its key in the ssh agent: ssh-add ~/.ssh/google_compute_engine
set -euo pipefail
# shellcheck source=launch/tpu/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
parse_flags "name= zone= project= ref= tunnel_through_iap internal_ips" "$@"
require name zone project
need_gcloud
read_commit

archive="runs/code_${commit:0:12}.tar.gz"
cd "$ROOT"
run mkdir -p runs
run git archive --format=tar.gz "--output=$archive" "$commit"
over_ssh scp "$archive" "$name:specsamp.tar.gz" --worker=all
run rm "$archive"
on_workers all "rm -rf specsamp.new && mkdir specsamp.new && tar -xzf specsamp.tar.gz -C specsamp.new && bash specsamp.new/launch/tpu/worker.sh install $commit"
note "all workers have ${commit:0:12}. Next: launch/tpu/run.sh --name=$name -- COMMAND"

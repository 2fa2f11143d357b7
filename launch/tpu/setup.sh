#!/usr/bin/env bash
# Puts one commit of this repository on every worker of a slice, and installs it there.
#
#   launch/tpu/setup.sh --name=pod
#
#   --name, --zone, --project   of the slice, as for create.sh
#   --ref       the commit, branch or tag; default HEAD, where nothing may be left to commit
#   --dry_run   print the commands, and run nothing
#
# Workers get Python 3.12 where they have nothing from 3.11, and a virtual environment with jax[tpu]. A worker notes
# the commit only when all of it succeeded, and runs no command without: run.sh hands it to the program as
# SPECSAMP_VERSION. Call it again after each commit; packages are installed once.
#
# For several workers gcloud wants its key in the agent: ssh-add ~/.ssh/google_compute_engine
set -euo pipefail
# shellcheck source=launch/tpu/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
parse_flags "name= zone= project= ref=" "$@"
require name zone project
need_gcloud
read_commit

archive="runs/code_${commit:0:12}.tar.gz"
cd "$ROOT"
run mkdir -p runs
run git archive --format=tar.gz "--output=$archive" "$commit"
tpus tpu-vm scp "$archive" "$name:specsamp.tar.gz" --worker=all
run rm "$archive"
on_workers all "rm -rf specsamp.new && mkdir specsamp.new && tar -xzf specsamp.tar.gz -C specsamp.new && bash specsamp.new/launch/tpu/worker.sh install $commit"
note "all workers have ${commit:0:12}. Next: launch/tpu/run.sh --name=$name -- COMMAND"

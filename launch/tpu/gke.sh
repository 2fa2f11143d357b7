#!/usr/bin/env bash
# The same through GKE, for slices that exist only there (tpu7x, Ironwood). It needs xpk 1.16 or newer: pip install xpk.
#
#   launch/tpu/gke.sh create --name=cluster --accelerator=tpu7x-16 --reservation=my-reservation
#   launch/tpu/gke.sh run --name=cluster --accelerator=tpu7x-16 -- python launch/benchmark.py --config=... --distributed --output=gs://bucket/results/tpu7x.json
#   launch/tpu/gke.sh delete --name=cluster
#
#   --name         names the cluster
#   --accelerator  such as tpu7x-16 or v5p-32; what nobody sells is refused with the nearest names
#   --zone         default $CLOUDSDK_COMPUTE_ZONE
#   --project      default $CLOUDSDK_CORE_PROJECT
#   --spot, --reservation=NAME   where the chips come from; default on demand
#   --ref          the commit that runs; default HEAD, where nothing may be left to commit
#   --job          names the workload; default the time
#   --image        with Python from 3.11 on; default python:3.12
#   --max_restarts of a workload whose slice was taken away; default 100
#   --dry_run      print the commands, and run nothing
#
# "run" waits for the end and ends with xpk's exit status: 0 where the command succeeded. Nodes cost money until
# "delete". xpk gives v6e-8 two hosts of four chips, and has no v5litepod-1 and v5litepod-4.
set -euo pipefail
# shellcheck source=launch/tpu/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
action="${1:-}"
case "$action" in
  create | run | delete) shift ;;
  --help | -h) usage && exit 0 ;;
  *) die "say what to do: create, run or delete; got '$action'" ;;
esac
parse_flags "name= accelerator= zone= project= spot reservation= ref= job= image= max_restarts=" "$@"
require name zone project
need xpk "pip install xpk"
cluster=("--cluster=$name" "${at[@]}")

if [[ $action == delete ]]; then
  run xpk cluster delete "${cluster[@]}" --force
  exit
fi
require accelerator
read_slice
note "$accelerator: $chips chips as $topology, $hosts host(s)"
slice=("--tpu-type=$accelerator" --num-slices=1)

if [[ $action == create ]]; then
  capacity=--on-demand
  [[ $spot == false ]] || capacity=--spot
  [[ -z $reservation ]] || capacity="--reservation=$reservation"
  [[ $spot == false || -z $reservation ]] || die "--spot and --reservation exclude each other"
  run xpk cluster create "${cluster[@]}" "${slice[@]}" "$capacity"
  note "the cluster costs money until launch/tpu/gke.sh delete --name=$name"
  exit
fi

require_command
read_commit
job="${job:-run-$(date -u +%m%d-%H%M%S)}"
code="runs/code_${commit:0:12}"
cd "$ROOT"
run mkdir -p "$code"
run git archive --format=tar "--output=$code.tar" "$commit"
run tar -xf "$code.tar" -C "$code"
run xpk workload create "--workload=$job" "${cluster[@]}" "${slice[@]}" "--base-docker-image=$image" "--script-dir=$code" \
  "--env=SPECSAMP_VERSION=$commit" "--max-restarts=$max_restarts" "--command=pip install --quiet '.[tpu]' && $(quoted "${command[@]}")"
run rm -r "$code" "$code.tar"
note "output: kubectl logs --follow --prefix --all-containers --selector=jobset.sigs.k8s.io/jobset-name=$job"
run xpk workload list "${cluster[@]}" "--wait-for-job-completion=$job"

#!/usr/bin/env bash
# Orders slices and runs commands through GKE, for slices that are only sold there (tpu7x, Ironwood). It needs xpk 1.16
# or newer: pip install xpk.
#
#   launch/tpu/gke.sh create --name=cluster --accelerator=tpu7x-16 --reservation=my-reservation
#   launch/tpu/gke.sh run --name=cluster --accelerator=tpu7x-16 -- python launch/benchmark.py --config=... --distributed --output=gs://bucket/results/tpu7x.json
#   launch/tpu/gke.sh delete --name=cluster
#
#   --name             name of the cluster
#   --accelerator      slice to use, such as tpu7x-16 or v5p-32; python3 specsamp/mesh/slices.py --list prints all names
#   --zone             zone that offers the slice; default $CLOUDSDK_COMPUTE_ZONE
#   --project          project that pays for it; default $CLOUDSDK_CORE_PROJECT
#   --dry_run          print the commands and run nothing
#
#  of create and run:
#   --replicas         slices of the cluster, each for a workload of its own; default 1
#
#  of create:
#   --spot, --reservation=NAME   order at the lower price, or take the slice from a reservation; default on demand
#   --internal_ips     make the cluster private: its nodes get no external addresses
#   --network, --subnetwork, --service_account   of the cluster and its nodes
#
#  of run:
#   --ref              commit to run; default HEAD, which then must hold all changes
#   --job              name of the workload; default the time
#   --image            image with Python 3.11 or newer; default python:3.12
#   --max_restarts     how often the workload is started again after its slice was taken away; default 100
#   --secret_env       exported variables that the command gets without being printed, separated by commas, such as
#                      --secret_env=HF_TOKEN; whoever may read JobSets in the cluster can read them
#
# With --replicas=N, "run" starts N workloads, whose commands end with --replica=0/N to N-1/N: processes of different
# slices do not join, and a slice that is taken away delays no other.
#
# "run" waits for the end and has the exit status of xpk: 0 if the command succeeded. Nodes cost money until "delete".
# xpk gives v6e-8 two hosts of four chips each, and does not offer v5litepod-1 and v5litepod-4.
set -euo pipefail
# shellcheck source=launch/tpu/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
action="${1:-}"
case "$action" in
  create) flags="accelerator= replicas= spot reservation= internal_ips network= subnetwork= service_account=" ;;
  run) flags="accelerator= replicas= ref= job= image= max_restarts= secret_env= --" ;;
  delete) flags="" ;;
  --help | -h) usage && exit 0 ;;
  *) die "the first argument must be create, run or delete; got '$action'" ;;
esac
shift
parse_flags "name= zone= project=${flags:+ $flags}" "$@"
require name zone project
require_max_restarts
require_replicas
read_secrets
need xpk "pip install xpk"
cluster=("--cluster=$name" "${at[@]}")

if [[ $action == delete ]]; then
  run xpk cluster delete "${cluster[@]}" --force
  exit
fi
require accelerator
read_slice
note "$accelerator: $chips chips as $topology, $hosts host(s)"
slice=("--tpu-type=$accelerator")

if [[ $action == create ]]; then
  capacity=--on-demand
  [[ $spot == false ]] || capacity=--spot
  [[ -z $reservation ]] || capacity="--reservation=$reservation"
  [[ $spot == false || -z $reservation ]] || die "--spot and --reservation exclude each other: give one of them"
  options=() for_cluster="" for_nodes=""
  [[ $internal_ips == false ]] || options+=(--private)
  [[ -z $network ]] || for_cluster+=" --network=$network"
  [[ -z $subnetwork ]] || for_cluster+=" --subnetwork=$subnetwork"
  [[ -z $service_account ]] || for_cluster+=" --service-account=$service_account" for_nodes=" --service-account=$service_account"
  [[ -z $for_cluster ]] || options+=("--custom-cluster-arguments=${for_cluster# }")
  [[ -z $for_nodes ]] || options+=("--custom-nodepool-arguments=${for_nodes# }")
  run xpk cluster create "${cluster[@]}" "${slice[@]}" "--num-slices=$replicas" "$capacity" ${options[@]+"${options[@]}"}
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
environment=("--env=SPECSAMP_VERSION=$commit") leftovers=("$code" "$code.tar")
if ((${#secret_names[@]})); then
  # xpk takes either --env or --env-file. It reads variables that have no value in the file from its own environment.
  environment=("--env-file=$code.env") leftovers+=("$code.env")
  note "$code.env sets SPECSAMP_VERSION and names ${secret_names[*]}"
  [[ $dry_run == true ]] || printf '%s\n' "SPECSAMP_VERSION=$commit" "${secret_names[@]}" >"$code.env"
fi
hide "${command[@]}"
prepare="pip install --quiet '.[tpu]' &&"
jobs=()
for ((replica = 0; replica < replicas; replica++)); do
  jobs+=("$job") own=()
  ((replicas == 1)) || jobs[replica]="$job-$replica" own=("--replica=$replica/$replicas")
  shown="$prepare $(quoted "${hidden[@]}" ${own[@]+"${own[@]}"})"
  run xpk workload create "--workload=${jobs[replica]}" "${cluster[@]}" "${slice[@]}" --num-slices=1 \
    "--base-docker-image=$image" "--script-dir=$code" "${environment[@]}" "--max-restarts=$max_restarts" \
    "--command=$prepare $(quoted "${command[@]}" ${own[@]+"${own[@]}"})"
done
shown=""
run rm -r "${leftovers[@]}"
status=0
for job in "${jobs[@]}"; do
  note "output: kubectl logs --follow --prefix --all-containers --selector=jobset.sigs.k8s.io/jobset-name=$job"
  run xpk workload list "${cluster[@]}" "--wait-for-job-completion=$job" || status=$?
done
exit "$status"

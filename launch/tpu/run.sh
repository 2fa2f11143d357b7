#!/usr/bin/env bash
# Runs a command on all workers of a slice, shows the output of worker 0 and ends with the exit status of the command.
#
#   launch/tpu/run.sh --name=pod -- python launch/benchmark.py --config=configs/chinchilla.py --distributed --output=gs://bucket/results/v4-32.json
#   launch/tpu/run.sh --name=pod -- python launch/first_tpu.py --distributed --config.batch=2 --config.mesh.data=2 --config.mesh.model=8 --output=gs://bucket/results/first_tpu.json
#   launch/tpu/run.sh --name=pod --attach    show the running command again, after a lost connection or ctrl-C
#   launch/tpu/run.sh --name=pod --stop      end the running command
#
#   --name, --zone, --project   the slice, as for create.sh
#   --secret_env                exported variables that the command gets without being printed or stored, separated by
#                               commas, such as --secret_env=HF_TOKEN
#   --tunnel_through_iap        connect through Identity-Aware Proxy, for hosts without external addresses
#   --internal_ips              connect to internal addresses, from a machine in the same network
#   --dry_run                   print the commands and run nothing
#
# The command runs in the checkout and the virtual environment that setup.sh made. It continues if this terminal is
# closed. Only one command can run at a time, because it needs all chips. If it fails, the last lines of every worker
# are shown. If the slice was taken away or restarted, the exit status is 75.
set -euo pipefail
# shellcheck source=launch/tpu/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
parse_flags "name= zone= project= attach stop secret_env= tunnel_through_iap internal_ips --" "$@"
require name zone project
if [[ $attach == true || $stop == true ]]; then
  [[ $attach != "$stop" ]] || die "--attach and --stop exclude each other: give one of them"
  [[ -z $secret_env && ${#command[@]} == 0 ]] || die "--attach and --stop are about the running command: give no other"
fi
read_secrets
need_gcloud
worker="bash specsamp/launch/tpu/worker.sh"
job=current

if [[ $stop == true ]]; then
  on_workers all "$worker stop $job"
  exit
fi

# Copies a file with the variables of --secret_env to all workers, where worker.sh reads and removes it.
send_secrets() {
  local secret
  ((${#secret_names[@]})) || return 0
  if [[ $dry_run == true ]]; then
    note "FILE has the values of ${secret_names[*]}, can be read by you only, and is removed:"
    over_ssh scp FILE "$name:specsamp_secrets.$job" --worker=all
    return
  fi
  secrets_file="$(mktemp "${TMPDIR:-/tmp}/specsamp_secrets.XXXXXX")" # mktemp lets only its owner read it
  trap 'rm -f "$secrets_file"' EXIT
  for secret in "${secret_names[@]}"; do
    printf 'export %s=%q\n' "$secret" "$(printenv "$secret")" >>"$secrets_file"
  done
  over_ssh scp "$secrets_file" "$name:specsamp_secrets.$job" --worker=all || return 1
  rm -f "$secrets_file"
}

start() {
  hide "${command[@]}"
  send_secrets && on_workers all "$worker start $job $(quoted "${command[@]}")" "$worker start $job $(quoted "${hidden[@]}")"
}

if [[ $attach == false ]]; then
  require_command
  job="$(date -u +%Y%m%d-%H%M%S)-$$"
  if ! start; then
    on_workers all "$worker stop $job" || true # the workers that started would wait for the others
    die "not all workers could start the command: see above" 1
  fi
fi
if [[ $dry_run == true ]]; then
  on_workers 0 "$worker follow $job"
  on_workers all "$worker finish $job"
  note "if the command failed:"
  on_workers all "$worker last $job"
  exit
fi

trap 'say "The command continues. Show it with launch/tpu/run.sh --name=$name --attach, end it with --stop."; exit 130' INT
lost() { die "$name is $state: $1" "$GONE"; }
for ((tries = 0; ; tries++)); do
  followed=0
  on_workers 0 "$worker follow $job" || followed=$?
  ((followed)) || break
  read_state
  ((followed != GONE)) || lost "worker 0 does not know this command, it was probably restarted"
  [[ $state == ACTIVE || $state == UNKNOWN ]] || lost "launch/tpu/keep_running.sh would order it again"
  ((tries < 10)) || lost "but worker 0 does not answer"
  say "The connection is lost, but the command continues: connecting again."
  sleep "$POLL_SECONDS"
done

if ! ended="$(on_workers all "$worker finish $job")"; then
  read_state
  lost "not all workers answer"
fi
status=0
while read -r host verb _ code; do
  [[ $verb == ended && $code != 0 ]] || continue
  say "$host ended with $code"
  # A lost worker makes the others fail, so its status is reported.
  [[ $status != 0 && $code != "$GONE" ]] || status="$code"
done <<<"$ended"
[[ $status == 0 ]] || on_workers all "$worker last $job" >&2 || true
exit "$status"

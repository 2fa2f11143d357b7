#!/usr/bin/env bash
# Stands for gcloud, xpk, ssh and scp, in the folder FAKE: records each call, prints the first line
# of `states`, and runs the commands of ssh in the folders of two workers. With a file busy it
# refuses one deletion, with a file drops it loses one connection, and with a file node it has a
# node without a request.
set -eu
cd "$FAKE"
printf '%s\x1f' "$(basename "$0")" "$@" >>calls
echo >>calls
[[ -e states ]] || exit 99 # no call is expected
command="" worker=""
for argument; do
  case "$argument" in
    --command=*) command="${argument#--command=}" ;;
    --worker=*) worker="${argument#--worker=}" ;;
  esac
done
case "$*" in
  *"queued-resources describe"*failedData*) echo "no capacity left" ;;
  *"queued-resources describe"*)
    state="$(head -n 1 states)"
    [[ $(wc -l <states) == 1 ]] || sed -i 1d states
    case "$state" in
      MISSING) echo "ERROR: (gcloud) NOT_FOUND: no such resource" >&2 && exit 1 ;;
      ERROR) echo "ERROR: the server is tired" >&2 && exit 1 ;;
      *) echo "$state" && echo "WARNING: a new version is there" >&2 ;;
    esac
    ;;
  *"queued-resources delete"*)
    if [[ -e busy ]]; then rm busy && exit 1; fi
    printf '%s\n' MISSING WAITING_FOR_RESOURCES ACTIVE >states
    rm -rf w-0 w-1 && mkdir w-0 w-1 # new machines
    ;;
  *"tpu-vm describe"*) [[ -e node ]] || { echo "ERROR: (gcloud) Resource 'pod' was not found" >&2 && exit 1; } ;;
  *"tpu-vm scp"*"pod:specsamp"*)
    from="" to=""
    for argument; do
      case "$argument" in
        pod:*) to="${argument#pod:}" ;;
        *) [[ -n $to ]] || from="$argument" ;; # the word before the destination
      esac
    done
    [[ $from == /* ]] || from="$OLDPWD/$from"
    [[ $to != specsamp_secrets* ]] || stat --format=%a "$from" "$from" >modes
    for host in w-0 w-1; do cp -p "$from" "$host/$to"; done
    ;;
  *"tpu-vm ssh"*)
    if [[ $command == *follow* && -e drops ]]; then rm drops && exit 255; fi
    [[ $worker == 0 ]] && hosts=w-0 || hosts="w-0 w-1"
    [[ $command != *"worker.sh start"* ]] || hosts="$hosts $hosts" # as when the connection is lost at once
    status=0
    for host in $hosts; do
      (cd "$host" && HOME="$PWD" HOST="$host" bash -c "$command") || { [[ $status != 0 ]] || status=$?; }
    done
    exit "$status"
    ;;
esac

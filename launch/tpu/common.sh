# shellcheck shell=bash
# shellcheck disable=SC2034  # what is set here is read by the scripts that source it
# Sourced by the scripts beside it: flags, messages, dry runs, and what several of them ask of Google Cloud.
# Runs on bash 3.2, which is what macOS has.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
POLL_SECONDS="${SPECSAMP_TPU_POLL_SECONDS:-20}"
readonly GONE=75 # exit status: the slice was taken away or restarted, so the same command is worth another try

# The flags of all scripts, with their defaults; parse_flags lets a script have only those that it names.
name="" accelerator="" job="" from="" to="" image="python:3.12" ref=HEAD reservation="" max_restarts=100
zone="${CLOUDSDK_COMPUTE_ZONE:-}" project="${CLOUDSDK_CORE_PROJECT:-}"
dry_run=false spot=false reserved=false attach=false stop=false delete_when_done=false
command=() # what follows "--"

say() { printf '%s\n' "$*" >&2; }

# die MESSAGE [STATUS]
die() {
  say "$(basename "$0"): $1"
  exit "${2:-2}"
}

# The comment at the head of the script is its manual.
usage() { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; }

# parse_flags "KNOWN FLAGS" ARGUMENTS...: sets the variable of each flag. A flag with "=" after it takes a value.
parse_flags() {
  local known=" $1 dry_run " flag value
  shift
  while (($#)); do
    case "$1" in
      --help | -h) usage && exit 0 ;;
      --) shift && command=("$@") && break ;;
      --*=*) flag="${1%%=*}" value="${1#*=}" ;;
      --*) flag="$1" value="" ;;
      *) die "unexpected argument '$1': flags are like --name=pod, a command comes after --" ;;
    esac
    flag="${flag#--}"
    flag="${flag//-/_}"
    if [[ $known == *" $flag= "* ]]; then
      if [[ $1 != *=* ]]; then
        (($# > 1)) || die "--$flag needs a value"
        value="$2"
        shift
      fi
      [[ -n $value ]] || die "--$flag needs a value"
    elif [[ $known == *" $flag "* ]]; then
      case "${value:-true}" in
        true | false) value="${value:-true}" ;;
        *) die "--$flag is true or false; got '$value'" ;;
      esac
    else
      known="${known% }"
      die "no flag --$flag: there are${known// / --}"
    fi
    printf -v "$flag" %s "$value"
    shift
  done
}

# require FLAGS...: ends the script where one has no value.
require() {
  local flag
  for flag; do
    [[ -z ${!flag} ]] || continue
    case "$flag" in
      name) die "no --name: name the slice, as in --name=pod" ;;
      zone) die "no --zone: add one that has your slices, as in --zone=us-central2-b, or export CLOUDSDK_COMPUTE_ZONE" ;;
      project) die "no --project: add --project=my-project, or export CLOUDSDK_CORE_PROJECT" ;;
      accelerator) die "no --accelerator: say what to order, as in --accelerator=v4-32" ;;
      *) die "no --$flag: see --help" ;;
    esac
  done
  [[ -z $name || $name =~ ^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$ ]] ||
    die "--name must be up to 40 small letters, digits and hyphens, from a letter on; got '$name'"
  at=("--project=$project" "--zone=$zone")
}

require_command() { ((${#command[@]})) || die "no command: add it after --, as in -- python launch/benchmark.py --distributed"; }

# Looks the accelerator up: its own name, topology, chips, hosts and runtime_version. Ends the script where nobody sells it.
read_slice() {
  local found
  found="$(python3 "$ROOT/launch/tpu/slices.py" "$accelerator" name topology chips hosts runtime_version)" || exit 2
  read -r accelerator topology chips hosts runtime_version <<<"$found"
}

# Sets commit to the one that --ref means. Only what is committed is copied: a result then says which code it is from.
read_commit() {
  commit="$(git -C "$ROOT" rev-parse --verify --quiet "$ref^{commit}")" || die "no commit '$ref' in $ROOT"
  local changed
  changed="$(git -C "$ROOT" status --porcelain --untracked-files=no | head -n 3 | cut -c 4- | paste -s -d ' ' -)"
  [[ $ref == HEAD && -n $changed ]] || return 0
  [[ $dry_run == false ]] || { note "changes that are not committed stay here: $changed ..." && return; }
  die "not committed: $changed ...: commit, or add --ref=$(git -C "$ROOT" rev-parse --short HEAD) to leave the changes here"
}

# Words as one would type them.
quoted() {
  local word separator="" quote="'"
  for word; do
    printf %s "$separator"
    separator=" "
    case "$word" in
      "" | *[!A-Za-z0-9_@%+=:,./-]*) ;;
      *) printf %s "$word" && continue ;;
    esac
    printf %s "$quote"
    while [[ $word == *"$quote"* ]]; do
      printf '%s%s' "${word%%"$quote"*}" "'\\''"
      word="${word#*"$quote"}"
    done
    printf %s "$word$quote"
  done
}

# A remark; in a dry run it stands between the commands, as a comment.
note() { if [[ $dry_run == true ]]; then printf '# %s\n' "$*"; else say "$*"; fi; }

# Runs a command, or prints it in a dry run.
run() {
  if [[ $dry_run == true ]]; then
    quoted "$@" && echo
  else
    say "\$ $(quoted "$@")"
    "$@"
  fi
}

# need PROGRAM HOW_TO_GET_IT; nothing is needed for a dry run.
need() { [[ $dry_run == true ]] || command -v "$1" >/dev/null || die "$1 is not installed: $2"; }

need_gcloud() { need gcloud "see cloud.google.com/sdk/docs/install, then gcloud auth login"; }

tpus() { run gcloud compute tpus "$@" "${at[@]}"; }

# on_workers WORKERS COMMAND, a line of shell. gcloud tries again where ssh fails, so COMMAND must bear to be run twice.
on_workers() {
  # A connection that died without a word is noticed after a minute and a half.
  tpus tpu-vm ssh "$name" "--worker=$1" "--command=$2" --ssh-flag=-oServerAliveInterval=30 --ssh-flag=-oConnectTimeout=30
}

# The state of the queued resource: ACTIVE, SUSPENDED, ...; MISSING where there is none, UNKNOWN where Google does not say.
read_state() {
  local answer
  if answer="$(gcloud compute tpus queued-resources describe "$name" "${at[@]}" '--format=value(state.state)' 2>&1)"; then
    state="$(grep -E '^[A-Z_]+$' <<<"$answer" | tail -n 1)"
    state="${state:-UNKNOWN}"
  elif [[ $answer == *NOT_FOUND* || $answer == *"was not found"* ]]; then
    state=MISSING
  else
    say "$answer"
    state=UNKNOWN
  fi
}

show_read_state() { run gcloud compute tpus queued-resources describe "$name" "${at[@]}" '--format=value(state.state)'; }

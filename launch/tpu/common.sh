# shellcheck shell=bash
# shellcheck disable=SC2034  # the scripts that source this file read the variables
# Sourced by the scripts in this folder: flags, messages, dry runs, and the calls of Google Cloud that they share.
# Runs on bash 3.2, the version that macOS has.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
# shellcheck source=launch/tpu/secrets.sh
source "$ROOT/launch/tpu/secrets.sh"
POLL_SECONDS="${SPECSAMP_TPU_POLL_SECONDS:-20}"
readonly GONE=75 # exit status: the slice was taken away or restarted, so trying the same command again can help

# The flags of all scripts and their defaults. Each script names the flags that it takes, see parse_flags.
name="" accelerator="" job="" from="" to="" image="python:3.12" ref=HEAD reservation="" max_restarts=100 replicas=1
zone="${CLOUDSDK_COMPUTE_ZONE:-}" project="${CLOUDSDK_CORE_PROJECT:-}"
network="" subnetwork="" service_account="" secret_env=""
dry_run=false spot=false reserved=false attach=false stop=false delete_when_done=false
internal_ips=false tunnel_through_iap=false
command=()      # the words after "--"
secret_names=() # of --secret_env, see read_secrets

say() { printf '%s\n' "$*" >&2; }

# die MESSAGE [STATUS]
die() {
  say "$(basename "$0"): $1"
  exit "${2:-2}"
}

# Prints the comment at the head of the script, which is its manual.
usage() { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; }

# parse_flags "KNOWN FLAGS" ARGUMENTS...: sets the variable of each flag. A flag that takes a value is given as "flag=", and
# "--" stands for a command.
parse_flags() {
  local known=" $1 dry_run " flag value
  shift
  while (($#)); do
    case "$1" in
      --help | -h) usage && exit 0 ;;
      --)
        [[ $known == *" -- "* ]] || die "there is nothing to do for a command here: '-- ${2:-}'"
        shift && command=("$@") && break
        ;;
      --*=*) flag="${1%%=*}" value="${1#*=}" ;;
      --*) flag="$1" value="" ;;
      *) die "unexpected argument '$1': write flags as --name=pod, and a command after --" ;;
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
        *) die "--$flag must be true or false; got '$value'" ;;
      esac
    else
      known="${known/ -- / }" known="${known% }"
      die "unknown flag --$flag: the flags are${known// / --}"
    fi
    printf -v "$flag" %s "$value"
    shift
  done
}

# require FLAGS...: ends the script if one of them has no value.
require() {
  local flag
  for flag; do
    [[ -z ${!flag} ]] || continue
    case "$flag" in
      name) die "--name is missing: give the slice a name, such as --name=pod" ;;
      zone) die "--zone is missing: add a zone that offers the slice, such as --zone=us-central2-b, or export CLOUDSDK_COMPUTE_ZONE" ;;
      project) die "--project is missing: add --project=my-project, or export CLOUDSDK_CORE_PROJECT" ;;
      accelerator) die "--accelerator is missing: name the slice to order, such as --accelerator=v4-32" ;;
      *) die "--$flag is missing: see --help" ;;
    esac
  done
  [[ -z $name || $name =~ ^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$ ]] ||
    die "--name must be up to 40 lowercase letters, digits and hyphens, starting with a letter; got '$name'"
  at=("--project=$project" "--zone=$zone")
}

require_max_restarts() {
  [[ $max_restarts =~ ^[0-9]+$ ]] || die "--max_restarts must be a whole number; got '$max_restarts'"
}

require_replicas() {
  [[ $replicas =~ ^[1-9][0-9]{0,3}$ ]] || die "--replicas must be a whole number from 1 to 9999; got '$replicas'"
}

require_command() { ((${#command[@]})) || die "the command is missing: add it after --, as in -- python launch/benchmark.py --distributed"; }

# Sets secret_names to the variables of --secret_env. Ends the script if one of them is not exported.
read_secrets() {
  local secret
  [[ -z $secret_env ]] || IFS=, read -r -a secret_names <<<"$secret_env"
  for secret in ${secret_names[@]+"${secret_names[@]}"}; do
    # The word is not repeated: it may be a secret that was given by mistake.
    [[ $secret =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]] ||
      die "--secret_env takes names of exported variables, separated by commas, such as HF_TOKEN, and no values"
    [[ -n "$(printenv "$secret")" ]] || die "--secret_env=$secret: this variable is not exported, or it is empty"
  done
}

# Looks up the accelerator and sets its full name, topology, chips, hosts and runtime_version. Ends the script if there is
# no such slice.
read_slice() {
  local found
  found="$(python3 "$ROOT/specsamp/mesh/slices.py" "$accelerator" name topology chips hosts runtime_version)" || exit 2
  read -r accelerator topology chips hosts runtime_version <<<"$found"
}

# Sets commit to the full hash of --ref. Only committed files are copied, so that every result names the code that made it.
read_commit() {
  commit="$(git -C "$ROOT" rev-parse --verify --quiet "$ref^{commit}")" || die "there is no commit '$ref' in $ROOT"
  local changed
  changed="$(git -C "$ROOT" status --porcelain --untracked-files=no | head -n 3 | cut -c 4- | paste -s -d ' ' -)"
  [[ $ref == HEAD && -n $changed ]] || return 0
  [[ $dry_run == false ]] || { note "uncommitted changes would not be copied: $changed ..." && return; }
  die "uncommitted changes: $changed ...: commit them, or add --ref=$(git -C "$ROOT" rev-parse --short HEAD) to run without them"
}

# Prints words as one would type them in a shell.
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

# Prints a remark; in a dry run it is a comment between the commands.
note() { if [[ $dry_run == true ]]; then printf '# %s\n' "$*"; else say "$*"; fi; }

# Prints a command and runs it; a dry run only prints it. Where `shown` is set, it is printed in place of the value of
# --command, which may hold secrets.
run() {
  local word printed=()
  for word; do
    [[ -z ${shown:-} || $word != --command=* ]] || word="--command=$shown"
    printed+=("$word")
  done
  if [[ $dry_run == true ]]; then
    quoted "${printed[@]}" && echo
  else
    say "\$ $(quoted "${printed[@]}")"
    "$@"
  fi
}

# need PROGRAM HOW_TO_GET_IT: ends the script if the program is not installed. A dry run needs no program.
need() { [[ $dry_run == true ]] || command -v "$1" >/dev/null || die "$1 is not installed: $2"; }

need_gcloud() { need gcloud "see cloud.google.com/sdk/docs/install, then gcloud auth login"; }

tpus() { run gcloud compute tpus "$@" "${at[@]}"; }

# over_ssh ssh|scp ARGUMENTS...: gcloud's ssh or scp, over the address that --tunnel_through_iap or --internal_ips asks for.
over_ssh() {
  local gcloud=(gcloud) how=()
  if [[ $tunnel_through_iap == true ]]; then
    gcloud=(gcloud alpha) how=(--tunnel-through-iap) # for TPUs only the alpha commands have this flag
  elif [[ $internal_ips == true ]]; then
    how=(--internal-ip)
  fi
  run "${gcloud[@]}" compute tpus tpu-vm "$@" ${how[@]+"${how[@]}"} "${at[@]}"
}

# on_workers WORKERS COMMAND [SHOWN]: runs COMMAND, a line of shell, on "all" workers or on one, and prints SHOWN in its
# place. gcloud tries again when ssh fails, so it must be safe to run COMMAND twice.
on_workers() {
  local shown="${3:-}"
  # ssh notices a dead connection after a minute and a half.
  over_ssh ssh "$name" "--worker=$1" "--command=$2" --ssh-flag=-oServerAliveInterval=30 --ssh-flag=-oConnectTimeout=30
}

# Sets state to that of the queued resource: ACTIVE, SUSPENDED, ...; MISSING if there is none, UNKNOWN if Google Cloud does
# not answer.
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

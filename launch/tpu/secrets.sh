# shellcheck shell=bash
# shellcheck disable=SC2034  # `hidden` is read by the scripts that source this file
# Sourced by common.sh and worker.sh: keeps secrets out of what is printed and stored.

# hide WORDS...: sets the array `hidden` to the words, without the values of what looks like a secret:
# HF_TOKEN=[hidden], --api_key=[hidden].
hide() {
  local word key
  hidden=()
  for word; do
    if [[ $word == *=* ]]; then
      key="${word%%=*}"
      case "$(printf %s "$key" | tr '[:lower:]-' '[:upper:]_')" in
        *TOKEN | *SECRET | *PASSWORD | *PASSWD | *CREDENTIALS | *API_KEY | *APIKEY | *ACCESS_KEY | *PRIVATE_KEY | *SECRET_KEY)
          word="$key=[hidden]"
          ;;
      esac
    fi
    hidden+=("$word")
  done
}

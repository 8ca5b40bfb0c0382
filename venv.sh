#!/bin/bash
# venv.sh PYTHON GOAL: makes .venv anew with that interpreter, quietly. What stops it is said in one
# or two lines, with the way out; GOAL is what make was asked for.
set -uo pipefail

python=$1
other="make ${2:-setup} PYTHON=python3.11"

stop() {
  echo "$*" >&2
  exit 1
}

# The reason, where there is one at all: of a traceback its last line, of a paragraph the sentence
# that says what is not there, else its first line.
why() {
  local said=${1:-it ends without a word}
  if grep -q '^Traceback' <<<"$said"; then tail -n 1 <<<"$said"
  else grep -m 1 -iE 'not found|no such|cannot|error' <<<"$said" || grep -m 1 . <<<"$said"; fi
}

command -v "$python" >/dev/null ||
  stop "No $python. On Debian: apt-get install python3 python3-venv"
said=$("$python" -c 'import sys; print("runs %d %d %s" % (sys.version_info[:2] + (sys.executable,)))' 2>&1)
read -r _ major minor path <<<"$(grep -m 1 '^runs [0-9]' <<<"$said")"
[ -n "${path:-}" ] ||
  stop "$(command -v "$python") is no Python that runs: $(why "$said"). Try another: $other"
((major > 3 || (major == 3 && minor >= 11))) ||
  stop "Trimtab needs Python 3.11 or newer; this is $major.$minor ($path). Try: $other"

echo '· Python environment in .venv'
said=$("$python" -m venv --clear .venv 2>&1)
[ -x .venv/bin/pip ] && exit
if grep -qE 'ensurepip is not|No module named .?(venv|ensurepip)' <<<"$said"; then
  stop 'No venv module. On Debian: apt-get install python3-venv'
fi
stop "$path makes no environment in .venv: $(why "$said")"$'\n'"Make room and a folder one may write to, or try another Python: $other"

#!/bin/bash
# fetch.sh COMMAND…: runs a package manager (npm or pip), quietly. What stops it is said in one line,
# with the way out; where the reason is none of those known here, in its own first words.
set -uo pipefail

stop() {
  echo "$*" >&2
  exit 1
}

tool=$(basename "$1")
mirror=PIP_INDEX_URL certificate=PIP_CERT
if [ "$tool" = npm ]; then
  mirror=npm_config_registry certificate=NODE_EXTRA_CA_CERTS
  command -v npm >/dev/null ||
    stop 'No npm: it fetches htmx, uPlot and Inter. On Debian: apt-get install npm'
  # Where it cannot write, npm ends without a word, or never.
  cache=${npm_config_cache:-${HOME:-}/.npm}
  { mkdir -p "$cache" && [ -w "$cache" ]; } 2>/dev/null ||
    stop "npm cannot write to $cache, its cache." \
      'Set HOME or npm_config_cache to a folder it may write to.'
  said=$(npm --version 2>&1) ||
    stop "npm does not run: $(head -n 1 <<<"$said"). On Debian: apt-get install nodejs npm"
fi

said=$("$@" 2>&1) && exit

why() { grep -oiE -m 1 "$1" <<<"$said" | head -n 1; }

untrusted='self.signed|CERTIFICATE_VERIFY_FAILED|UNABLE_TO_(GET|VERIFY)\w+'
full='ENOSPC|no space left'
unreached='ENOTFOUND|EAI_AGAIN|ECONN\w+|ETIMEDOUT|E(NET|HOST)UNREACH|\w+_TIMEOUT|\w*Timeout\w*Error'
unreached+='|ProxyError|NameResolutionError|name resolution|name or service not known'
unreached+='|network is unreachable|no route to host|connection refused'
if reason=$(why "$untrusted"); then
  stop "$tool does not trust who answers it ($reason)." \
    "Set $certificate to the file of your network's certificate."
elif reason=$(why "$full"); then
  stop "$tool has no room left on the disk ($reason). Make some: torch takes more than a gigabyte."
elif reason=$(why "$unreached"); then
  stop "$tool reaches no package registry ($reason): no network, or a proxy before it." \
    "Set HTTPS_PROXY=http://HOST:PORT, or $mirror to a mirror."
fi
echo "$tool failed:" >&2
{ grep -i -m 8 error <<<"$said" || head -n 8 <<<"$said"; } >&2
exit 1

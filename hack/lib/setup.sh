# Sets up what every command in hack/ needs, once: a Python, a virtual environment from the lock file, this project in it.
# Sourced from the repository root. `ensure_venv` is quick when nothing changed (a stamp in the environment says so).
# shellcheck shell=sh

VENV="$PWD/.venv"
unset PYTHONDONTWRITEBYTECODE  # each of the many processes that tests start would compile every module anew

say() { printf '==> %s\n' "$*" >&2; }

die() { printf 'error: %s\n' "$*" >&2; exit 1; }

# `help_if_asked "$@"`: print the comment at the top of the command, if that is all that is wanted.
help_if_asked() {
    case ${1:-} in -h | --help) sed -n '2,/^[^#]/{/^#/s/^# \{0,1\}//p}' "hack/$(basename "$0")"; exit 0 ;; esac
}

# Debian packages, installed when missing and when we may: `need_packages python3-venv git`.
need_packages() {
    missing=""
    for package in "$@"; do
        dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing="$missing $package"
    done
    [ -z "$missing" ] && return 0
    [ "$(id -u)" = 0 ] || die "these Debian packages are missing:$missing. Install them as root: apt-get install$missing"
    say "installing Debian packages:$missing"
    # shellcheck disable=SC2086
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing; } \
        >/tmp/dra-driver-apt.log 2>&1 || { tail -n 20 /tmp/dra-driver-apt.log >&2; die "apt-get failed; its last lines are above"; }
}

find_python() {
    for candidate in "${PYTHON:-}" python3.13 python3.12 python3.11 python3; do
        [ -n "$candidate" ] && command -v "$candidate" >/dev/null 2>&1 || continue
        "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { command -v "$candidate"; return 0; }
    done
    return 1
}

ensure_venv() {
    stamp="$VENV/.stamp"
    wanted=$(cat requirements-dev.lock pyproject.toml | sha256sum)
    [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && return 0
    python=$(find_python) || { need_packages python3 python3-venv; python=$(find_python); } ||
        die "Python 3.11 or newer is needed; set PYTHON to its path"
    [ -x "$VENV/bin/python" ] || {
        say "creating .venv with $("$python" --version)"
        "$python" -m venv "$VENV" 2>/dev/null || { need_packages python3-venv; "$python" -m venv --clear "$VENV"; }
    }
    say "installing the locked dependencies into .venv (a minute on a fresh machine)"
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements-dev.lock
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
    printf '%s\n' "$wanted" > "$stamp"
}

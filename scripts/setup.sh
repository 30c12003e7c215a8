# Sourced by dflash, test and check: makes the private Python environment once.
# It is made again when pyproject.toml, the Python version or the place of the checkout changes,
# and when a set-up was interrupted. Works with the bash 3.2 of macOS.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
venv="${DFLASH_VENV:-$root/.venv}"
venv="${venv%/}"
mark="$venv/.dflash-ready" # last line of a finished set-up
owned="$venv/.dflash-owned" # this folder was made here and may be removed here
lock="$venv.locked"
unset PYTHONPATH PYTHONHOME

fail() {
    printf '%s\n' "$*" >&2
    exit 2
}

say() { printf 'dflash set-up: %s\n' "$*" >&2; }

# The first Python 3.11-3.13 that runs, as an absolute path; the machine's own choice first.
find_python() {
    local name path found=""
    for name in python3 python3.13 python3.12 python3.11; do
        while IFS= read -r path; do
            case "$("$path" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" in
                3.11 | 3.12 | 3.13) ;;
                *) continue ;;
            esac
            found="$path"
            if "$path" -c 'import ensurepip, venv' 2>/dev/null; then
                printf '%s\n' "$path"
                return
            fi
        done < <(type -aP "$name" || true)
    done
    if [ -n "$found" ]; then
        fail "$found lacks the modules venv and ensurepip, which make a private environment." \
            "Install them (on Debian and Ubuntu: apt-get install python3-venv) and run this again."
    fi
    fail "No Python 3.11, 3.12 or 3.13 was found on the PATH." \
        "Install one (python.org, your package manager) and run this again."
}

# What a finished set-up depends on, as one line.
setup_key() {
    local version
    version="$("$venv/bin/python" -ISc 'import sys; print(sys.version.split()[0])' 2>/dev/null)" ||
        return 1
    printf '%s %s %s\n' "$(cksum <"$root/pyproject.toml")" "$version" "$root"
}

# is_ready EXTRA: whether the environment is whole and has the extra ("" or "dev").
is_ready() {
    local key extra
    [ -f "$mark" ] && { IFS= read -r extra && IFS= read -r key; } <"$mark" || return 1
    [ "$key" = "$(setup_key)" ] && { [ -z "$1" ] || [ "$extra" = "$1" ]; }
}

# The lock is a symbolic link to the number of its process: made in one step with its owner in it,
# removed in one step, and there without flock, which macOS lacks.
lock_setup() {
    local waited=0 owner refusal
    mkdir -p "$(dirname "$venv")" || fail "Cannot create $(dirname "$venv")."
    [ -L "$lock" ] || [ ! -e "$lock" ] || fail "$lock is in the way. Remove it and run this again."
    until refusal="$(LC_ALL=C ln -sn "$$" "$lock" 2>&1)"; do
        # "File exists" also when it has gone since: its owner has just finished.
        case "$refusal" in
            *"File exists"*) ;;
            *) fail "Cannot write in $(dirname "$venv"): $refusal" ;;
        esac
        owner="$(readlink "$lock" || true)"
        if [ -n "$owner" ] && is_dead "$owner"; then
            break_lock "$owner"
            continue
        fi
        [ "$waited" -gt 0 ] || say "another one is running (process ${owner:-?}); waiting for it ($lock)"
        waited=$((waited + 1))
        sleep 0.2
    done
    trap 'rm -f "$lock"' EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM HUP
}

# is_dead PROCESS: whether there is none of that number; another user's is alive.
is_dead() {
    local why
    why="$(LC_ALL=C kill -0 "$1" 2>&1)" && return 1
    case "$why" in *"No such process"*) return 0 ;; *) return 1 ;; esac
}

# break_lock OWNER: remove the lock of a set-up that was killed. One process at a time, and only
# while it is still OWNER's: of two that saw a dead owner, the first may hold the lock by now.
break_lock() {
    local breaker
    if ln -sn "$$" "$lock.break" 2>/dev/null; then
        [ "$(readlink "$lock" || true)" != "$1" ] || rm -f "$lock"
        rm -f "$lock.break"
        return
    fi
    breaker="$(readlink "$lock.break" || true)"
    if [ -n "$breaker" ] && is_dead "$breaker" &&
        [ "$(readlink "$lock.break" || true)" = "$breaker" ]; then
        fail "A set-up that was killed left $lock and $lock.break. Remove both and run this again."
    fi
    sleep 0.2
}

# Make the environment anew unless a whole one of the same Python stands there.
make_venv() {
    local python
    if [ -f "$mark" ] && "$venv/bin/python" -Ic 'import pip' 2>/dev/null &&
        [ "$(sed -n 3p "$mark")" = "$root" ]; then
        rm -f "$mark"
        return
    fi
    python="$(find_python)" || exit $?
    if [ -e "$venv" ] && [ ! -f "$owned" ] && [ -n "$(ls -A "$venv")" ]; then
        fail "$venv exists and was not made by this script." \
            "Move it away, or set DFLASH_VENV to another folder."
    fi
    say "making a private environment in $venv with $python"
    rm -rf "$venv"
    mkdir "$venv" && : >"$owned"
    "$python" -m venv "$venv" || fail "$python could not make an environment in $venv."
}

# setup EXTRA: make sure that the environment is there, with progress on standard error.
setup() {
    is_ready "$1" && return
    lock_setup
    if ! is_ready "$1"; then
        make_venv
        say "installing the package and what it needs (once; about 500 MB${1:+, and 570 MB for $1})"
        PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1 "$venv/bin/python" -m pip install \
            --editable "$root${1:+[$1]}" >&2 ||
            fail "The packages could not be installed; pip's lines above say why." \
                "Mend that (often the network) and run this again."
        printf '%s\n%s\n%s\n' "$1" "$(setup_key)" "$root" >"$mark.new"
        mv "$mark.new" "$mark"
        say "done"
    fi
    trap - EXIT INT TERM HUP # first: behind the next line the lock may be another's
    rm -f "$lock"
}

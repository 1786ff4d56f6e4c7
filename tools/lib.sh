# shellcheck shell=bash
# What the scripts beside this file share: the virtual environment, its locks and the test servers.
# Sourced, not run. Everything is relative to the repository's root, where it leaves the caller.
# Settings: PYTHON (which interpreter makes the environment), ADAPTERSYNC_VENV (where it lies).

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
VENV="${ADAPTERSYNC_VENV:-.venv}"
# Packages are installed without bytecode: the first import of a module writes it. Where the caller's environment forbids
# that, as images do, every process would compile all it imports anew; a vLLM is three processes of 3,000 modules each.
# So that such a caller's wish is kept for the sources, it lies in the environment and not beside them.
unset PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX
PYTHONPYCACHEPREFIX=$(realpath -m "$VENV")/bytecode
TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu

say() { printf '==> %s\n' "$*" >&2; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null 2>&1; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    die "no Python >= 3.11 (tried: ${PYTHON:-python3, python3.11 to 3.13}). Install one or point to it: PYTHON=/path/to/python3.12 $0"
}

need_space() { # need_space MEGABYTES, of a first installation: pip would fail half-way, not saying what it wanted
    local free
    free=$(df -Pm "$VENV" | awk 'NR == 2 { print $4 }')
    ((free >= $1)) || compgen -G "$VENV/.installed-*" >/dev/null || die "$VENV has $free MB free and needs $1. Free some, or put it elsewhere: ADAPTERSYNC_VENV=/other/disk/venv $0"
}

make_venv() {
    [[ -x $VENV/bin/python ]] && return
    local python version
    python=$(find_python)
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    "$python" -c 'import ensurepip' 2>/dev/null ||
        die "$python has no venv module. Install it: apt-get install python$version-venv"
    say "creating $VENV with Python $version"
    "$python" -m venv "$VENV"
}

pip_install() { "$VENV/bin/python" -m pip install -qq --disable-pip-version-check --no-compile "$@"; }

# Prints the pip options with which torch's CPU build is found: none where pip's own configuration offers it. A build
# for GPUs is recognised by the CUDA libraries it requires. PyTorch's index is added only when needed: an index
# that cannot be reached would fail an installation that does not need it.
torch_options() {
    local pin
    pin=$(grep '^torch==' deploy/locks/cpu.txt)
    if "$VENV/bin/python" -m pip install --dry-run --ignore-installed --no-deps --only-binary :all: --quiet \
        --disable-pip-version-check --report - "$pin" 2>/dev/null |
        "$VENV/bin/python" -c '
import json, sys
requires = json.load(sys.stdin)["install"][0]["metadata"].get("requires_dist", [])
sys.exit(any(name.startswith(("nvidia-", "cuda-")) for name in requires))' 2>/dev/null; then
        return
    fi
    echo "--extra-index-url $TORCH_CPU_INDEX"
}

# install_environment simulated|cpu|gpu [dev]: idempotent; a stamp per part holds the hash of what made it.
install_environment() {
    local mode=$1 part
    make_venv
    for part in "$mode" ${2:+"$2"}; do
        is_current "$part" && continue
        case $part in
            simulated) need_space 500; install_lock base ;;
            cpu)
                need_space 6000
                say "installing training and serving for CPU (about 4 GB, a few minutes)"
                install_lock base
                # shellcheck disable=SC2046 # two words are meant
                install_lock cpu $(torch_options)
                ;;
            gpu)
                need_space 20000
                say "installing training and serving for GPU (about 15 GB, several minutes)"
                install_lock base
                pip_install --editable '.[embedded,trl,tokenize,ledger,otel,gpu,plot]'
                ;;
            dev) install_lock dev ;;
        esac
        # The build requirement is in the lock: without isolation nothing is downloaded for it.
        [[ $part == dev ]] || pip_install --no-deps --no-build-isolation --editable .
        fingerprint "$part" >"$VENV/.installed-$part"
    done
}

install_lock() {
    say "installing deploy/locks/$1.txt"
    pip_install --no-deps --requirement "deploy/locks/$1.txt" "${@:2}" ||
        die "pip could not install deploy/locks/$1.txt (its message is above). Check the network or pip's configuration (pip config list), then run $0 again: it goes on where it stopped"
}

fingerprint() { # of a part, and of where this repository lies: the environment points to it
    { echo "$1 $PWD"; cat pyproject.toml deploy/locks/*.txt; } | sha256sum
}

is_current() { # an environment for cpu or gpu serves the simulated fleet too
    local stamp
    for stamp in "$1" $([[ $1 == simulated ]] && echo cpu gpu); do
        [[ -f $VENV/.installed-$stamp && $(<"$VENV/.installed-$stamp") == "$(fingerprint "$stamp")" ]] && return
    done
    return 1
}

# system_packages PACKAGE...: Debian packages, through apt where we may.
system_packages() {
    local sudo=()
    if ((EUID != 0)); then
        sudo=(sudo -n)
        "${sudo[@]}" true 2>/dev/null || die "missing: $*. Install it: sudo apt-get install $*"
    fi
    command -v apt-get >/dev/null || die "missing: $*, and there is no apt-get. Install it with this system's package manager"
    say "installing $* with apt-get"
    "${sudo[@]}" apt-get update -qq
    "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "$@" >/dev/null
}

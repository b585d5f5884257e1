#!/usr/bin/env bash
# The tests of the kernels and of the engine on a Linux machine without a network, with the torch and transformers that it has.
#
#   tests/on_another_host.sh pack FOLDER [3.12]    where there is a network: wheels for that machine's Python, about 15 MB
#   tests/on_another_host.sh run FOLDER [ARGUMENTS OF PYTEST]    there: an environment in FOLDER/venv, the kernels built, the tests
#
# That machine needs: python3 with its headers, torch, transformers, tokenizers and huggingface_hub; CMake, ninja and a C++ compiler.
# The default model has to be under WEFT_HOME or in the user's cache; without it, its tests fail.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# What weft and its tests need beside those, with what these need. No package brings another: numpy, torch and transformers stay that
# machine's own.
packages=(
  annotated-doc annotated-types anyio certifi click gguf h11 httpcore httpx idna llguidance markdown-it-py mdurl minijinja msgspec pip
  prometheus-client pydantic pydantic-core rich shellingham sniffio starlette typer typing_extensions typing-inspection uvicorn
  nanobind pathspec scikit-build-core
  execnet hypothesis iniconfig packaging pluggy pygments pytest pytest-xdist sortedcontainers
)

pack() {
  local platforms=()
  for glibc in 2_17 2_28 2_31 2_34; do platforms+=(--platform "manylinux_${glibc}_x86_64"); done
  platforms+=(--platform manylinux2014_x86_64)
  "${PYTHON:-python3}" -m pip --disable-pip-version-check download --quiet --no-deps --only-binary=:all: \
    --python-version "${2:-3.12}" --implementation cp "${platforms[@]}" -c constraints.txt --dest "$1" "${packages[@]}"
  du -sh "$1"
}

run() {
  local folder venv
  folder=$(realpath "$1") && shift
  venv=$folder/venv
  if [[ ! -x $venv/bin/python ]]; then
    # Without pip, which a system's Python may lack; the wheel of pip can be run as it is. The packages of the interpreter, which may
    # itself be of an environment, are seen through a .pth file.
    "${PYTHON:-python3}" -m venv --without-pip "$venv"
    "${PYTHON:-python3}" -c 'import site; print(*site.getsitepackages(), sep="\n")' \
      > "$("$venv/bin/python" -c 'import site; print(site.getsitepackages()[0])')/of_this_machine.pth"
  fi
  echo "==> installing the wheels, and weft with its kernels"
  local pip=("$venv/bin/python" "$(echo "$folder"/pip-*.whl)/pip" --disable-pip-version-check --quiet)
  "${pip[@]}" install --no-index --no-deps --ignore-installed "$folder"/*.whl
  "${pip[@]}" install --no-index --no-deps --no-build-isolation --ignore-installed -e .
  "$venv/bin/weft" doctor || true
  lscpu | grep -E '^(Model name|CPU\(s\)|Thread|Flags)' | sed -E 's/^(Flags:).* (avx2) /\1 ... \2 /' | cut -c1-300 || true
  echo "==> pytest"
  if (($# == 0)); then set -- tests/kernels tests/engine; fi
  "$venv/bin/python" -m pytest -q -p no:cacheprovider -rfEs --durations=10 "$@"
}

case ${1:-} in
  pack) pack "${@:2}" ;;
  run) run "${@:2}" ;;
  *) sed -n '2,8s/^# \{0,1\}//p' "$0" && exit 2 ;;
esac

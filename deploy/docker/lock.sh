#!/usr/bin/env bash
# Writes the lock files of the images: what pyproject.toml asks for, in the versions that the tests ran with, with hashes.
# usage: deploy/docker/lock.sh [VENV]     VENV: the environment of the tests (default .venv). Needs `uv` (pip install uv).
# torch is not in them: the Dockerfile takes it from an index of its own. UV_FIND_LINKS: a folder that has its wheel.
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=${1:-.venv}
torch=$(sed -n 's/^ARG TORCH=//p' deploy/docker/Dockerfile)
index=$(sed -n 's/^ARG TORCH_INDEX=//p' deploy/docker/Dockerfile)
tested=$("$venv/bin/python" -m pip freeze --exclude-editable | grep -E '^[A-Za-z0-9_.-]+==' | grep -v '^torch==')
[ -n "${UV_FIND_LINKS:-}" ] && where=() || where=(--index "$index" --index-strategy unsafe-best-match)

lock() { # IMAGE EXTRA...
  local extras=() file=deploy/docker/$1.lock
  for extra in "${@:2}"; do extras+=(--extra "$extra"); done
  uv pip compile --quiet --no-header --universal --python-version 3.11 --generate-hashes --no-annotate --upgrade \
    --no-emit-package torch "${where[@]}" "${extras[@]}" \
    --override <(echo "$torch") --constraint <(echo "$tested") pyproject.toml --output-file "$file"
  sed -i '1i # Made by deploy/docker/lock.sh.' "$file"
}

lock tokenizer tokenizer tracing
lock engine engine gateway tracing
lock load client load

#!/usr/bin/env bash
# Builds the Compose stack, starts it with Prometheus, checks it from outside (probe.py), takes it down. docs/compose.md.
# usage: deploy/check/run.sh       needs Docker with Compose, and ports 8000, 50050, 3000 and 9090 of loopback
# STANDIN=program: for a machine that reaches no registry of images. It is called with the folder and a command; it has to
# provide Docker and an image python:3.11-slim, build and start the stack (-p chk, $COMPOSE_FILES), run the command, clean up.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=$(command -v "${PYTHON:-python3}")
export COMPOSE_PROFILES=observe

if [ -n "${STANDIN:-}" ]; then
  export COMPOSE_FILES="-f compose.yaml -f deploy/check/compose.yaml"
  export COMPOSE="docker-compose $COMPOSE_FILES -p chk"
  exec "$STANDIN" "$PWD" "$python -m deploy.check.probe"
fi

compose="docker compose"
docker compose version >/dev/null 2>&1 || compose=docker-compose
export COMPOSE="$compose -p tokenwire-check"
trap '$COMPOSE --profile load down --volumes --timeout 3 >/dev/null 2>&1' EXIT
$COMPOSE build
$COMPOSE up --detach
"$python" -m deploy.check.probe

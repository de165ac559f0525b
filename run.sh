#!/bin/sh
# The main job, from nothing: set up, fetch the default model, and ask it about a chapter of a novel.
# With arguments: any dustin command, as in `./run.sh chat`; `./run.sh serve` installs the server's packages too.
set -eu
cd "$(dirname "$0")"
if [ "${1:-}" = serve ]; then EXTRAS="[serve]"; fi
. ./setup.sh
if [ $# -gt 0 ]; then
    exec "$VENV_BIN/python" -m dustin "$@"
fi
exec "$VENV_BIN/python" -m dustin generate --file bench/data/northanger_abbey_chapter_1.txt --max-tokens 64 \
    "What was the profession of Catherine's father? Answer in one sentence."

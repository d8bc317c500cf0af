#!/usr/bin/env bash
# Train a small model family, keep it in a repository, merge it under a budget, measure the merges.
#
#   examples/demo.sh [DIRECTORY]
#
# DIRECTORY is `demo` by default. It is removed first where an earlier demo made it, and left alone
# where something else did. PYTHON names the interpreter, `python3` by default.
set -euo pipefail

directory=${1:-demo}
marker=.made-by-mergegit-demo
weight=0.4

interpreter=$(command -v "${PYTHON:-python3}") || {
    echo "demo: there is no ${PYTHON:-python3}; name a Python with PYTHON=..." >&2
    exit 1
}
[[ $interpreter == /* ]] || interpreter=$PWD/$interpreter
examples=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export PYTHONPATH=${examples%/*}${PYTHONPATH:+:$PYTHONPATH}

python() { "$interpreter" "$@"; }
mergegit() { "$interpreter" -m mergegit "$@"; }
explain() { printf '\n# %s\n' "$*"; }
run() {
    printf '$ %s\n' "$*"
    "$@"
}

if [[ -e $directory && ! -e $directory/$marker ]]; then
    echo "demo: $directory exists, and no demo made it; name another directory" >&2
    exit 1
fi
rm -rf -- "$directory"
mkdir -p -- "$directory"
touch -- "$directory/$marker"
run cd "$directory"
examples=$(python -c 'import os, sys; print(os.path.relpath(sys.argv[1]))' "$examples")

explain "A base model and three experts, trained here and now on text that comes with Python."
run python "$examples/make_family.py" family

explain "A repository. Each expert is kept as its difference from the base."
run mergegit init
for checkpoint in base python prose cpp; do
    run mergegit add "family/$checkpoint"
done
run mergegit status

explain "What a merge of the three would cost at each budget, known before anything is read."
run mergegit plan python prose cpp -p weight=$weight --curve
explain "The same at a tenth of the experts' bytes."
run mergegit plan python prose cpp -p weight=$weight --budget 10%

explain "Merge at that budget, and once more with everything read."
run mergegit merge python prose cpp -p weight=$weight --budget 10% -b merged-10
run mergegit merge python prose cpp -p weight=$weight -b merged-full
explain "Every merge is a commit whose parents are the base and the experts."
run mergegit log --graph

explain "Back to directories that any Hugging Face tool reads."
for branch in merged-10 merged-full python; do
    run mergegit checkout "$branch" "checkouts/$branch"
done
explain "What was added comes back byte for byte: no difference is listed here."
run diff -r family/python checkouts/python

explain "Loss on held-out text, in nats per token; lower is better."
run python "$examples/evaluate.py" family/{base,python,prose,cpp} checkouts/merged-{10,full}

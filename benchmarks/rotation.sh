#!/bin/sh
# The speed of recipes that rotate inputs, of that of w8a8: each recipe in turn, several times, on one GPU.
#
#     sh benchmarks/rotation.sh [SHAPE [TURNS]]    # llama-3-8b, 3; about 40 s a turn and recipe
#
# The rows to compare are those of one turn: a prompt of 2,048 tokens, and one and eight sequences behind 512 tokens.
set -eu
shape=${1:-llama-3-8b}
for turn in $(seq "${2:-3}"); do
    for recipe in w8a8 w8a8-rotate w8a8-rotate-all; do
        echo "turn $turn, $recipe"
        python -m bminf_lite bench --shape "$shape" --recipe "$recipe" -p 2048 -n 64 -d 512 -b 1 -b 8 -r 3 -o csv
    done
done

#!/usr/bin/env bash
# Every selector in turn with the same seeds on mathematics, then tables: bash run_math.sh [MODEL [FLAG ...]]
#
# Without MODEL: Qwen2.5-Math-1.5B on MATH where there is a GPU, else the demo. The flags go to gmts.py as they are.
# Set SEEDS="0 1 2" for several seeds, SELECTORS for some of the selectors, OUT for the folder, SCRIPT for a script
# in the place of gmts.py. A run that was stopped goes on where it was, one that is done is not repeated, and one
# that was begun with other flags is refused: set OUT for another folder.
set -euo pipefail
cd "$(dirname "$0")"
python=${PYTHON:-python}
seeds=${SEEDS:-0}
selectors=${SELECTORS:-all random entropy gmts exact}
model=${1:-}
[ $# -eq 0 ] || shift
if [ -z "$model" ]; then
    if $python -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then
        model=Qwen2.5-Math-1.5B
    else
        model=demo
    fi
fi
data=()
[ "$model" = demo ] || data=(--data math)
script=${SCRIPT:-gmts.py}
out=${OUT:-runs/math-$(basename "$model")${SCRIPT:+-$(basename "${script// /-}")}}
for seed in $seeds; do
    for select in $selectors; do
        run=$out/$select-$seed
        flags=(--model "$model" --select "$select" --seed "$seed" "${data[@]}" "$@")
        if compgen -G "$run/step-*[0-9]/trainer.pt" > /dev/null; then
            flags+=(--resume)
        else
            rm -rf "$run"
        fi
        $python $script --out "$run" "${flags[@]}"
    done
done
$python - "$out" "$selectors" "$seeds" <<'TABLES'
import csv
import sys
from statistics import mean, stdev

out, selectors, seeds = sys.argv[1], sys.argv[2].split(), sys.argv[3].split()
runs = {}
for select in selectors:
    runs[select] = [list(csv.DictReader(open(f"{out}/{select}-{seed}/metrics.csv"))) for seed in seeds]
steps = [row["step"] for row in runs[selectors[0]][0] if row["accuracy"]]  # those with an evaluation


def accuracies(select, step):
    return [float(next(row["accuracy"] for row in rows if row["step"] == step)) for rows in runs[select]]


def late(select, column):
    """Mean of the last 20 steps, run by run."""
    return [mean([float(row[column]) for row in rows[1:][-20:]] or [0.0]) for rows in runs[select]]


def spread(values):
    return f"{mean(values):.3f}±{stdev(values):.3f}" if len(values) > 1 else f"{values[0]:.3f}"


def line(*cells):
    print("| " + " | ".join(f"{cell:>14}" for cell in cells) + " |")


line("selector", "before", "after", "sampled", "entropy", "grad_norm", "seconds")
print("|---" * 7 + "|")
for select in selectors:
    seconds = mean(sum(float(row["seconds"]) for row in rows[1:]) for rows in runs[select])
    figures = f"{mean(late(select, 'entropy')):.3f}", f"{mean(late(select, 'grad_norm')):.1f}", f"{seconds:.0f}"
    before, after = accuracies(select, steps[0]), accuracies(select, steps[-1])
    line(select, spread(before), spread(after), spread(late(select, "reward")), *figures)
print("mean ± standard deviation of the accuracy; sampled (reward), entropy, grad_norm: of the last 20 steps\n")

PAIRS = "gmts-entropy exact-entropy random-entropy gmts-all entropy-all exact-all random-all exact-gmts"
pairs = [pair.split("-") for pair in PAIRS.split() if set(pair.split("-")) <= set(selectors)]
shown = steps[1:]  # five of them at most
if len(shown) > 5:
    shown = [shown[i * len(shown) // 5 - 1] for i in range(1, 6)]
if len(seeds) > 1 and pairs:
    line("difference", *(f"step {step}" for step in shown))
    print("|---" * (len(shown) + 1) + "|")
    for a, b in pairs:
        cells = []
        for step in shown:
            gaps = [x - y for x, y in zip(accuracies(a, step), accuracies(b, step))]
            cells.append(f"{mean(gaps):+.3f}±{stdev(gaps) / len(gaps) ** 0.5:.3f}")
        line(f"{a} - {b}", *cells)
    print("accuracy, paired by seed; mean ± standard error")
TABLES

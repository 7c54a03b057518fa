#!/usr/bin/env bash
# Every selector in turn with the same seeds on mathematics, then one table: bash run_math.sh [MODEL]
# Without MODEL: Qwen2.5-Math-1.5B on MATH where there is a GPU, else the demo. SEEDS="0 1 2", SELECTORS and OUT can
# be set; further arguments go to gmts.py as they are. A run that was stopped goes on where it was.
set -euo pipefail
cd "$(dirname "$0")"
python=${PYTHON:-python}
seeds=${SEEDS:-0}
selectors=${SELECTORS:-all random entropy gmts exact}
model=${1:-}
[ $# -eq 0 ] || shift
if [ -z "$model" ]; then
    if $python -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then model=Qwen2.5-Math-1.5B; else model=demo; fi
fi
if [ "$model" = demo ]; then data=(); else data=(--data math); fi
out=${OUT:-runs/math-$(basename "$model")}
for seed in $seeds; do
    for select in $selectors; do
        run=$out/$select-$seed
        arguments=(--model "$model" --select "$select" --seed "$seed" "${data[@]}" "$@")
        if compgen -G "$run/step-*[0-9]/trainer.pt" > /dev/null; then arguments=(--resume); else rm -rf "$run"; fi
        $python gmts.py --out "$run" "${arguments[@]}"
    done
done
$python - "$out" "$selectors" "$seeds" <<'TABLE'
import csv, statistics, sys
out, selectors, seeds = sys.argv[1], sys.argv[2].split(), sys.argv[3].split()
print(f"{'selector':9} {'seeds':>5} {'before':>15} {'after':>15} {'reward':>7} {'entropy':>8} {'grad norm':>9} {'seconds':>8}")
for select in selectors:
    runs = [list(csv.DictReader(open(f"{out}/{select}-{seed}/metrics.csv"))) for seed in seeds]
    def spread(row):
        values = [float(rows[row]["accuracy"]) for rows in runs]
        return f"{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f}" if len(values) > 1 else f"{values[0]:.3f}"
    def mean(column, last=10):
        values = [float(row[column]) for rows in runs for row in rows[1:][-last:]]
        return statistics.mean(values) if values else 0.0
    seconds = statistics.mean(sum(float(row["seconds"]) for row in rows[1:]) for rows in runs)
    print(f"{select:9} {len(runs):5} {spread(0):>15} {spread(-1):>15} {mean('reward'):7.3f} {mean('entropy'):8.3f} "
          f"{mean('grad_norm'):9.2f} {seconds:8.0f}")
print("(mean ± standard deviation over the seeds; reward, entropy and gradient norm: mean of the last 10 steps)")
TABLE

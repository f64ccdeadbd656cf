# Short names for the commands of the README and of CONTRIBUTING.md.
.PHONY: train test style format bench

train:
	bash scripts/train.sh

test:
	bash scripts/test.sh

style:
	bash scripts/check_style.sh

format:
	bash scripts/check_style.sh --fix

bench:
	.venv/bin/python benchmarks/bench_backward.py

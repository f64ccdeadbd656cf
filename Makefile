# Short names for the commands of the README and of CONTRIBUTING.md.
.PHONY: train test style docs format bench gpu-check

train:
	bash scripts/train.sh

test:
	bash scripts/test.sh

style:
	bash scripts/check_style.sh

docs:
	bash scripts/docs.sh

format:
	bash scripts/check_style.sh --fix

bench:
	.venv/bin/python benchmarks/bench_backward.py

# On a GPU machine: build, every GPU test, a short benchmark -> benchmarks/results/gpu-check.json
gpu-check:
	python3 scripts/gpu_check.py

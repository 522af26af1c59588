# Two commands matter: `make quickstart` and `make test`. Everything happens in .venv; nothing else is touched.

PYTHON ?= python3
# A pinned torch: the range in setup.py would let pip change a torch you chose. Override with e.g. TORCH=torch==2.11.0.
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
RUN := runs/quickstart
# DeepSpeed must not compile its CUDA ops while it is installed; nothing here uses them.
export DS_BUILD_OPS := 0
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
export PYTHONUNBUFFERED := 1

.PHONY: help install quickstart finetune-demo test-unit test test-all lint results report clean

help:
	@echo "make quickstart   install, prepare text, train a small GPT with FP8 moments and activations"
	@echo "make finetune-demo  install, also TRL; a small Llama learns to call a calculator, and its answers are checked"
	@echo "make test-unit    install, and run the tests of coat_dist and megatron_patches that start no processes"
	@echo "make test         install, and run what CI runs"
	@echo "make test-all     install, and run all tests: more layouts and numbers of ranks, random models, several nodes"
	@echo "make lint         ruff and mypy"
	@echo "make results      measure the layer, the step and the optimizer again, on one GPU"
	@echo "make report       versions, GPUs, active FP8 paths"
	@echo "make clean        remove .venv and runs/"

install: $(STAMP)

$(STAMP): setup.py pyproject.toml constraints.txt Makefile
	$(PYTHON) -c 'import sys; assert (3, 11) <= sys.version_info[:2] <= (3, 12), "Python: got %d.%d, accepted: 3.11 or 3.12 (make PYTHON=...)" % sys.version_info[:2]'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip setuptools wheel
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt '$(TORCH)'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

# Two ranks: on as many GPUs where there are two, on one GPU a single rank, and without a GPU two gloo ranks.
RANKS = $(shell $(BIN)/python -c 'import torch; print(min(torch.cuda.device_count(), 2) or 2)')

# DeepSpeed then does not look for other accelerators, with a warning of each process.
WITHOUT_GPU = $(shell $(BIN)/python -c 'import torch; print("" if torch.cuda.is_available() else "DS_ACCELERATOR=cpu")')

quickstart: $(STAMP)
	$(BIN)/python launch/prepare_data.py --input stdlib --tokenizer bpe:512 --max-bytes 2M --output $(RUN)/data/stdlib-bpe512
	rm -rf $(RUN)/checkpoints $(RUN)/metrics.jsonl $(RUN)/loss.png
	$(WITHOUT_GPU) PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/deepspeed --num_gpus $(RANKS) --log_level error launch/pretrain.py \
		--deepspeed_config configs/deepspeed/quickstart.json \
		--model configs/models/tiny.json --data $(RUN)/data/stdlib-bpe512 \
		--train-steps 130 --warmup-steps 5 --min-lr 1e-3 --eval-interval 26 --eval-steps 2 \
		--save $(RUN)/checkpoints --output $(RUN)
	$(BIN)/python launch/plot.py $(RUN) --output $(RUN)/loss.png

finetune-demo: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[trl]'
	$(WITHOUT_GPU) PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/deepspeed --num_gpus $(RANKS) --log_level error examples/fine_tuning.py

# What a change of a kernel or of the step measures again (CONTRIBUTING.md); benchmarks/README.md has all commands. Transformer
# Engine, to measure beside: PEERS=DIR.
results: $(STAMP)
	$(BIN)/python -m benchmarks.speed.layer --variants coat 'coat saved in e4m3' --name layer-peers-7b $(if $(PEERS),--peers $(PEERS))
	$(BIN)/python -m benchmarks.speed.layer --presets llama2-7b llama2-13b llama3-8b olmo-1b --kernels 0 --tokens 16384
	$(BIN)/python -m torch.distributed.run --nproc_per_node 1 -m benchmarks.speed.step --name step-1-rank
	$(BIN)/python -m torch.distributed.run --nproc_per_node 1 -m benchmarks.speed.engine_step
	$(BIN)/python -m benchmarks.speed.optimizer
	$(BIN)/python -m benchmarks.speed.train --ranks 1 $(if $(PEERS),--peers $(PEERS))

report: $(STAMP)
	$(BIN)/python -m coat_dist.report

# Processes that share the test files. Each file stays in one: some start ranks once for all their tests. In the files'
# own order: by the number of its tests, the launchers' few and long ones would come last and alone.
WORKERS ?= 2
PYTEST = $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# Without the tests of programs, and without what is marked "long" (see tests/conftest.py).
test-unit: $(STAMP)
	$(PYTEST) -m "not slow and not long" tests/coat_dist tests/megatron_patches

# Without what is marked "slow".
test: $(STAMP)
	$(PYTEST) tests

test-all: $(STAMP)
	$(PYTEST) -m "" tests

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

clean:
	rm -rf $(VENV) runs

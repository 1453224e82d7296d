# One recipe a command; `make help` lists them. The Python that runs is chosen, and set up where needed, by .ci/python.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test test-gpu generate generate-all check-generated golden explain standalone from-module compile-all package verify bench report evidence evidence-peers sweep tune sanitize clean

WORKERS ?= 2
# $(call python,emit|run|test|bench) starts a recipe: the interpreter that has what the command needs, or its set-up's error.
python = @py="$$(./.ci/python $(1))" && "$$py"
specs = $(if $(SPEC),"$(SPEC)") $(SPECS)
need-spec = @test -n '$(strip $(SPEC)$(SPECS))' || { echo "make $@ needs a spec: make $@ SPEC=specs/default.yaml (shipped: $$(cd codegen && echo specs/*.yaml))" >&2; exit 2; }
prepack = $(if $(filter-out 0,$(PREPACK)),--prepack)
emit-options = $(if $(PRECISION),--precision $(PRECISION)) $(prepack) $(foreach t,$(TARGETS),--target $(t)) $(if $(DEVICE),--device $(DEVICE)) \
	$(if $(OUT),--out "$(OUT)") $(if $(filter-out 0,$(DEBUG)),--debug) $(if $(filter-out 0,$(FORCE)),--force)

help: ## this list
	@echo "Specialised GPU kernels for fixed shapes, from a YAML spec."
	@echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo "Variables: SPEC or SPECS (a list), PRECISION=fp32|tf32|fp16|bf16, PREPACK=1, TARGETS=\"cpu sm_80 sm_90a\", DEVICE=h100|a100|..., OUT=generated, DEBUG=1, FORCE=1, PYTHON=python3"

demo-options = $(if $(PRECISION),--precision $(PRECISION)) $(foreach t,$(TARGETS),--target $(t)) $(if $(DEVICE),--device-class $(DEVICE)) \
	$(if $(OUT),--out "$(OUT)")

demo: ## generate specs/default.yaml, build it, run it beside PyTorch
	$(call python,run) -m bench.demo $(if $(SPEC),"$(SPEC)") $(demo-options)

test: ## all tests that need no GPU
	$(call python,test) -m pytest -m "not gpu" -n $(WORKERS)

test-gpu: ## the tests marked gpu, on a machine with a GPU
	$(call python,test) -m pytest -m gpu

generate: ## emit the packages of SPEC or SPECS (PRECISION=, PREPACK=1, TARGETS=, DEVICE=, OUT=, DEBUG=1, FORCE=1)
	$(need-spec)
	$(call python,emit) -m codegen.emit $(specs) $(emit-options)

generate-all: ## emit every package listed in generated/index.yaml
	$(call python,emit) -m codegen.emit --all

check-generated: ## fail when a checked-in package differs from what its spec emits
	$(call python,emit) -m codegen.emit --check

golden: ## renew tests/golden.json, the hashes of all that is emitted and explained, and list what changed
	$(call python,test) -m tests.golden

explain: ## print the plan of SPEC: kernels, tiles, memory, floor
	$(need-spec)
	$(call python,emit) -m codegen.emit $(specs) $(emit-options) --explain

standalone: ## also write <package>/standalone.py: one file that imports nothing of ours
	$(need-spec)
	$(call python,emit) -m codegen.emit $(specs) $(emit-options) --standalone

package: ## a wheel of SPEC that needs only torch: no compiler, no runtime (TARGETS="sm_80 cpu", PRECISION=, PREPACK=1, VERSION=, OUT=dist)
	$(need-spec)
	@py="$$(./.ci/python run)"; made="$$(mktemp -d)"; trap 'rm -rf "$$made"' EXIT; \
	"$$py" -m codegen.emit $(specs) $(if $(PRECISION),--precision $(PRECISION)) $(prepack) $(foreach t,$(TARGETS),--target $(t)) $(if $(DEVICE),--device $(DEVICE)) --out "$$made" && \
	"$$py" -m runtime package "$$made"/*/ --out "$(or $(OUT),dist)" $(if $(VERSION),--version "$(VERSION)")

from-module: ## the spec of a PyTorch file in KernelBench's form, whose code is run (MODULE=path/to/file.py[:Model] or a folder, NAME=, OUT=, PRECISION=, GENERATE=1, FORCE=1, JOBS=)
	@test -n '$(MODULE)' || { echo "make $@ needs a file or a folder: make $@ MODULE=path/to/file.py[:Model]" >&2; exit 2; }
	$(call python,run) -m codegen.from_module "$(MODULE)" $(if $(NAME),--name $(NAME)) $(if $(OUT),--out "$(OUT)") $(if $(PRECISION),--precision $(PRECISION)) \
		$(if $(filter-out 0,$(GENERATE)),--generate) $(if $(filter-out 0,$(FORCE)),--force) $(if $(JOBS),--jobs $(JOBS))

compile-all: ## compile the full matrix of shapes, precisions and targets with nvcc (minutes)
	$(call python,test) -m tests.compile_matrix

bench-options = $(if $(PRECISION),--precision $(PRECISION)) $(if $(TARGETS),--target "$(strip $(TARGETS))") $(if $(ON),--device $(ON))

verify: ## is SPEC's model right? against float64 and PyTorch, on ordinary and adversarial data (PRECISION=, PREPACK=1, TARGETS= one, ON=cpu|cuda)
	$(need-spec)
	$(call python,run) -m bench.verify $(specs) $(bench-options) $(prepack)

bench: ## time SPEC's model beside PyTorch and other peers (BACKWARD=1: forward and backward; PEERS=evidence|autotuned|all or names, PRECISION=, PREPACK=1, TARGETS= one, ON=)
	$(need-spec)
	$(call python,run) -m bench.run $(specs) $(bench-options) $(prepack) $(if $(filter-out 0,$(BACKWARD)),--backward) $(if $(PEERS),--peers "$(PEERS)")

evidence: ## verify and time every checked-in package on this card; writes bench/results/<gpu>/ (PREPACK=1, BUDGET= seconds; run again to go on)
	$(call python,run) -m bench.evidence $(specs) $(bench-options) $(prepack) $(if $(BUDGET),--budget-s $(BUDGET))

evidence-peers: ## the same with the autotuned peers, minutes a package (PEERS_CACHE= folder for Inductor's cache)
	$(call python,run) -m bench.evidence --autotuned $(specs) $(bench-options) $(if $(BUDGET),--budget-s $(BUDGET))

tune: ## measure the planner's candidates for SPEC on this card and record them in codegen/tuned/ (PRECISION=, DEVICE=, BUDGET= seconds)
	$(need-spec)
	$(call python,run) -m bench.tune $(specs) $(if $(PRECISION),--precision $(PRECISION)) $(if $(DEVICE),--class $(DEVICE)) \
		$(if $(ON),--device $(ON)) $(if $(BUDGET),--budget-s $(BUDGET))

sweep: ## COUNT=100 random specs (SEED=0, SMALL=1 for a CPU): right? how fast beside PyTorch? (BUDGET= seconds; run again to go on)
	$(call python,run) -m bench.sweep $(if $(SEED),--seed $(SEED)) $(if $(COUNT),--count $(COUNT)) $(if $(filter-out 0,$(SMALL)),--small) \
		$(if $(ON),--device $(ON)) $(foreach t,$(TARGETS),--target $(t)) $(if $(BUDGET),--budget-s $(BUDGET))

report: ## from bench/results: build/report/index.html with pictures, the README's table, the figures of docs/kernels.md
	$(call python,bench) -m bench.report

sanitize: ## compute-sanitizer's four tools over SPEC's kernels (all checked-in packages without SPEC) at small shapes
	$(call python,run) -m bench.sanitize $(specs) $(if $(PRECISION),--precision $(PRECISION)) $(foreach t,$(TARGETS),--target $(t))

clean: ## remove what these commands made (.venv, build/, packages of your own under generated/)
	@rm -rf .venv build dist *.egg-info .pytest_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
	@if git rev-parse --is-inside-work-tree >/dev/null 2>&1; then git clean -fdXq generated; fi
